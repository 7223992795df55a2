"""How a good file becomes a bad one. Every mutator takes bytes and a random generator, and tells what it did.

A mutation is described in a few words, short for a small change: of several cases that fail at one place the campaign
shows the one with the shortest description.
"""

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

Mutated = tuple[bytes, str]
Mutator = Callable[[bytes, Random], Mutated]

SCRIPT = "<script>alert(1)</script>"
TEXTS = [
    "", " ", "\0", "\x1b]0;title\x07\x1b[2J", "\r\n\x7f\x9b2J", "\ud800", "é×漢🦊\u2028", "\u202eabc", SCRIPT,
    "</script></style></iframe>" + SCRIPT, '"><img src=x onerror=alert(1)>', "javascript:alert(1)", "{{ 7*7 }}",
    "%s{0}", "../../etc/passwd", "/dev/zero", "hf:nobody/nothing", "²", "x" * 5000, "a/b\\c:d", "nan", "-1", "1e999",
    "step-1",
]  # fmt: skip
NUMBERS = [
    0, -1, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**9, 10**12, 10**18,
    10**30, -(10**18), 0.0, -0.0, 0.5, 1e-45, 1e-320, 1e38, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip


class Raw(str):
    """JSON that `json.dumps` would not write: it goes into the file as it is."""


HUGE, DEEP, DEEP_OBJECT = Raw("9" * 5000), Raw("[" * 5000 + "]" * 5000), Raw('{"a":' * 5000 + "1" + "}" * 5000)
RAWS = [HUGE, Raw("-" + "9" * 5000), DEEP, DEEP_OBJECT, Raw("1e999"), Raw("9" * 400 + ".5"), Raw("Infinity")]
BAD_UTF8 = [b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xe2\x82", b"\xfe\xff", b"\xef\xbb\xbf"]
MAGIC = [
    b"\0", b"\0" * 64, b"\xff" * 8, b"PK\x03\x04", b"\x89PNG\r\n\x1a\n", b"PAR1", b"#!/bin/sh\n", b"%PDF-",
    b"\x80\x04.", b"{", b"[", b'"', b"]}", b"\\u0000", b"\r", b"\n", b"\n\n", b"---\n", b"\t", b"9" * 5000, b"1e999",
    b"NaN", b"-",
    SCRIPT.encode(),
]  # fmt: skip


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:24]}… ({len(text)} characters)"


# --- bytes --------------------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, rng: Random) -> Mutated:
    """Flip, cut, insert, splice, repeat, overwrite: what a bad disk or a bad copy does, and some malice."""
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice([1, 2, 8, 64, 1024]))
    kind = rng.randrange(11)
    if kind == 0 and at < len(data):
        bit = rng.randrange(8)
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], f"bit {bit} of byte {at} flipped"
    if kind == 1:
        return data[:at], f"cut off at byte {at}"
    if kind == 2:
        return data[:at] + data[end:], f"bytes {at}:{end} cut out"
    if kind == 3:
        extra = rng.choice(MAGIC)
        return data[:at] + extra + data[at:], f"{show(extra)} put in at byte {at}"
    if kind == 4:
        extra = rng.choice(BAD_UTF8)
        return data[:at] + extra + data[at:], f"{show(extra)} put in at byte {at}"
    if kind == 5:
        start = rng.randrange(len(data) + 1)
        piece = data[start : start + rng.choice([4, 32, 256])]
        return data[:at] + piece + data[at:], f"bytes from {start} repeated at {at}"
    if kind == 6:
        noise = rng.randbytes(end - at)
        return data[:at] + noise + data[end:], f"bytes {at}:{end} made random"
    if kind == 7:
        times = rng.choice([2, 3, 50])
        return data * times, f"all of it {times} times"
    if kind == 8:
        return data[:at] + bytes(end - at) + data[end:], f"bytes {at}:{end} made zero"
    if kind == 9:
        first, last = sorted((at, rng.randrange(len(data) + 1)))
        return data[last:] + data[:first], f"bytes from {last} on put before byte {first}"
    other = rng.choice([b"", b"\n", b"null", b"[]", b"{}", b"0", b'""', b"\0" * 4096, rng.randbytes(200), *MAGIC])
    return other, f"all of it replaced by {show(other)}"


# --- JSON ---------------------------------------------------------------------------------------------------


def dump_json(value: Any, *, indent: int | None = 1) -> bytes:
    """JSON with NaN, half characters, repeated keys and what stands raw in it."""
    raws: list[str] = []

    def stand_in(part: Any) -> Any:
        if isinstance(part, Raw):
            raws.append(str(part))
            return f"@raw{len(raws) - 1}@"
        if isinstance(part, dict):
            return {key: stand_in(inner) for key, inner in part.items()}
        return [stand_in(inner) for inner in part] if isinstance(part, list) else part

    text = json.dumps(stand_in(value), indent=indent).replace('"@again@', '"')
    for number, raw in enumerate(raws):
        text = text.replace(f'"@raw{number}@"', raw)
    return text.encode()


def mutate_tree(value: Any, rng: Random) -> tuple[Any, str]:
    """Change one place of a value as JSON knows them, in place where that is possible."""
    places: list[tuple[Any, Any, str]] = []  # parent, key, path

    def walk(part: Any, path: str) -> None:
        for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
            places.append((part, key, f"{path}.{key}" if path else str(key)))
            walk(part[key], places[-1][2])

    walk(value, "")
    if not places or rng.random() < 0.03:
        other = rng.choice([None, [], {}, 0, "x", True, [value], {"a": value}, *RAWS])
        return other, f"all of it → {show(other)}"
    # A deep list has many places, its top few: those are chosen as often as all below them.
    tops = [place for place in places if place[0] is value]
    parent, key, path = rng.choice(tops if rng.random() < 0.4 else places)
    kind = rng.randrange(10)
    if kind == 0:
        del parent[key]
        return value, f"{path} dropped"
    if kind == 1 and isinstance(parent, dict):
        name = rng.choice([*TEXTS, key.upper(), key + "s", "__class__"])
        parent[name] = parent.pop(key)
        return value, f"{path} renamed {show(name)}"
    if kind == 2 and isinstance(parent, dict):
        other = make_value(parent[key], rng)
        parent[f"@again@{key}"] = other
        return value, f"{path} twice, then {show(other)}"
    if kind == 2:
        parent[key:key] = [parent[key]] * rng.choice([1, 2, 300])
        return value, f"{path} repeated"
    if kind == 3:
        parent[key] = [parent[key]]
        return value, f"{path} put in a list"
    if kind == 4:
        parent[key] = {"a": parent[key]}
        return value, f"{path} put in an object"
    if kind == 5 and isinstance(parent, dict):
        other = make_value(None, rng)
        name = rng.choice(TEXTS)
        parent[name] = other
        return value, f"{path} beside a new {show(name)}: {show(other)}"
    if kind == 6:
        donor = rng.choice(places)
        parent[key] = json.loads(json.dumps(donor[0][donor[1]]))
        return value, f"{path} → what is at {donor[2]}"
    other = make_value(parent[key], rng)
    parent[key] = other
    return value, f"{path} → {show(other)}"


def make_value(like: Any, rng: Random) -> Any:
    """A bad value: often of the same type as `like`, which reaches further."""
    if rng.random() < 0.5:
        if isinstance(like, bool) or like is None:
            return rng.choice([True, False, None])
        if isinstance(like, int | float):
            return rng.choice([*NUMBERS, -like, like + 1, like * 2, like * 1000])
        if isinstance(like, str):
            return rng.choice([*TEXTS, like + rng.choice(TEXTS), like[: len(like) // 2]])
    return rng.choice(
        [None, True, False, [], {}, [[]], [None], {"": None}, *RAWS, rng.choice(TEXTS), rng.choice(NUMBERS), [1, 2, 3]]
    )


def mutate_json(data: bytes, rng: Random) -> Mutated:
    value, words = mutate_tree(json.loads(data), rng)
    return dump_json(value), words


def mutate_jsonl(data: bytes, rng: Random) -> Mutated:
    """Lines dropped, repeated, exchanged, torn; or one line's value changed."""
    lines = data.splitlines(keepends=True) or [b"{}\n"]
    at = rng.randrange(len(lines))
    kind = rng.randrange(8)
    if kind == 0:
        lines.insert(at, lines[at])
        return b"".join(lines), f"line {at} twice"
    if kind == 1:
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
        return b"".join(lines), f"lines {at} and {other} exchanged"
    if kind == 2:
        lines[at] = lines[at].rstrip(b"\n")
        return b"".join(lines), f"line {at} without its end"
    if kind == 3:
        other_line = rng.choice(
            [b"\n", b"null\n", b"[]\n", b"{}\n", b"3\n", b"#\n", b"\xff\n", b"\0\n", HUGE.encode() + b"\n"]
        )
        lines.insert(at, other_line)
        return b"".join(lines), f"{show(other_line)} put in at line {at}"
    if kind == 4:
        lines[at], words = mutate_bytes(lines[at], rng)
        return b"".join(lines), f"line {at}: {words}"
    try:
        value, words = mutate_tree(json.loads(lines[at]), rng)
    except ValueError:  # changed before
        return b"".join(lines[:at]), f"cut off at line {at}"
    lines[at] = dump_json(value, indent=None) + b"\n"
    return b"".join(lines), f"line {at}: {words}"


# --- YAML ---------------------------------------------------------------------------------------------------

SCALARS = [
    "", "~", "null", ".nan", ".inf", "-.inf", "1e400", "9" * 5000, "-1", "0", "1", "2", "1000000000", "1" + "0" * 30,
    "0x7fffffffffffffff", "0o17", "1_000", "190:20:30", "2020-01-01", "yes", "no", "²", "[]", "{}", "[[[1]]]", "{a: 1}",
    "[" * 5000 + "]" * 5000, '"\\uD800"', '"\\0"', '"\\e]0;t\\a\\e[2J"', f'"{SCRIPT}"',
    "!!python/object/apply:os.abort []", "!!python/name:os.system", "!!binary aGk=", "&a [*a]", "*unknown", "!x y",
    "'unclosed", "|\n  text", "../canary/x",
    "/dev/zero", "hf:nobody/nothing", "1e-45", "0.5", "-0.5", "1e38", "text", "a: b: c", "@", "`", "%",
]  # fmt: skip
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def mutate_yaml(data: bytes, rng: Random) -> Mutated:
    """A value, key or line of a config changed; now and then its tree, written as JSON, which is YAML too."""
    if rng.random() < 0.35:
        try:
            value, words = mutate_tree(yaml.safe_load(data), rng)
            return dump_json(value), words
        except (yaml.YAMLError, ValueError, TypeError):
            pass  # changed before
    lines = data.decode(errors="surrogateescape").split("\n")
    at = rng.randrange(len(lines))
    line, kind = lines[at], rng.randrange(12)
    name = line.partition(":")[0]
    if kind == 0:
        del lines[at]
        words = f"{name.strip()}: line dropped"
    elif kind == 1:
        lines.insert(rng.randrange(len(lines)), line)
        words = f"{name.strip()}: line twice"
    elif kind == 2:
        lines[at] = " " * rng.randrange(6) + line.strip()
        words = f"{name.strip()}: indented otherwise"
    elif kind == 3:
        new = rng.choice([*SCALARS, "<<", "? x", "modle", "format_version"])
        lines[at] = line.replace(name.strip(), new, 1) if name.strip() else new
        words = f"{name.strip()}: named {show(new)}"
    elif kind == 4:
        new = rng.choice([BOMB, "---", "...", "%YAML 9.9", "\t", "- 1", "\x00", "a: 1", "{", "\ufeff", "# ×"])
        lines.insert(at, new)
        words = f"line {at}: {show(new)} put in"
    else:
        new = rng.choice([*SCALARS, *(str(number) for number in NUMBERS)])
        lines[at] = f"{name}: {new}"
        words = f"{name.strip()} → {show(new)}"
    return "\n".join(lines).encode(errors="surrogateescape"), words


# --- safetensors --------------------------------------------------------------------------------------------

DTYPES = [
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "I64",
    "I32",
    "I16",
    "I8",
    "U8",
    "U16",
    "BOOL",
    "C64",
    "X",
    "",
]
FLOATS = [float("nan"), float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e-45, -0.0, 1e4]


def split_tensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes behind it. ValueError where it is none."""
    try:
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        if not isinstance(header, dict):
            raise ValueError("no header")
        return header, data[8 + size :]
    except (struct.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


def join_tensors(header: bytes, body: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + body


def mutate_tensors(data: bytes, rng: Random) -> Mutated:
    """Header, names, shapes, offsets or numbers of a safetensors file changed."""
    try:
        header, body = split_tensors(data)
        names = [name for name, about in header.items() if name != "__metadata__" and "data_offsets" in about]
        name = rng.choice(names)
        about = header[name]
        first, last = about["data_offsets"]
        if not 0 <= first <= last <= len(body):
            raise ValueError(name)
    except (ValueError, IndexError, TypeError, KeyError):
        return mutate_bytes(data, rng)
    kind = rng.randrange(14)
    if kind == 0:
        size = rng.choice([0, 1, 7, len(data), 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
        return struct.pack("<Q", size) + data[8:], f"header length → {size}"
    if kind == 1:
        about["dtype"] = rng.choice(DTYPES)
        words = f"dtype of {name} → {about['dtype']!r}"
    elif kind == 2:
        about["shape"] = rng.choice(
            [
                [],
                [0],
                [-1],
                [1],
                [2**62, 2**62],
                [2**63],
                [10**30],
                about["shape"][::-1],
                [*about["shape"], 1],
                "x",
                [1.5],
                [(last - first) // 4],
                [True],
                None,
            ]
        )
        words = f"shape of {name} → {show(about['shape'])}"
    elif kind == 3:
        about["data_offsets"] = rng.choice(
            [
                [0, 0],
                [last, first],
                [first, last + 4],
                [first + 4, last],
                [-4, last],
                [0, 2**63],
                [0, 10**30],
                [first],
                [first, last, last],
                None,
                ["0", "4"],
            ]
        )
        words = f"offsets of {name} → {show(about['data_offsets'])}"
    elif kind == 4:
        new = rng.choice([*TEXTS, name + ".0", name.upper(), "__metadata__", rng.choice(names), "epoch_counts"])
        header[new] = header.pop(name)
        words = f"{name} renamed {show(new)}"
    elif kind == 5:
        # The rest moves up, so that the file stays a good one.
        body = body[:first] + body[last:]
        del header[name]
        for other in header.values():
            if "data_offsets" in other and other["data_offsets"][0] >= last:
                other["data_offsets"] = [offset - (last - first) for offset in other["data_offsets"]]
        words = f"{name} gone"
    elif kind == 6:
        new = rng.choice([*TEXTS, name + "x", "a.b.c", "layers.9.keys"])
        header[new] = {"dtype": "F32", "shape": [2], "data_offsets": [len(body), len(body) + 8]}
        body += struct.pack("<2f", rng.choice(FLOATS), 1.0)
        words = f"{show(new)} added"
    elif kind == 7:
        # As many numbers in another shape, as many bytes in another type: a good file too.
        count = (last - first) // 4
        about |= rng.choice([{"shape": [count]}, {"shape": [1, count]}, {"shape": [count, 1]}, {"dtype": "I32"},
                             {"dtype": "BF16", "shape": [2 * count]}, {"dtype": "U8", "shape": [4 * count]},
                             {"dtype": "F16", "shape": [*about["shape"], 2]}])  # fmt: skip
        words = f"{name} as {about['dtype']} {show(about['shape'])}"
    elif kind == 8:
        header["__metadata__"] = rng.choice(
            [None, {}, {"a": 1}, {"about": "x"}, {"format": SCRIPT}, [], {"a": "\0"}, DEEP]
        )
        words = f"metadata → {show(header['__metadata__'])}"
    elif kind == 9:
        changed, words = mutate_tree(header, rng)
        return join_tensors(dump_json(changed, indent=None), body), f"header: {words}"
    elif kind in (10, 11) and last - first >= 4:
        number = rng.choice(FLOATS)
        at = rng.randrange(first, last - 3, 4)
        times = 1 if rng.random() < 0.5 else (last - at) // 4
        body = body[:at] + struct.pack("<f", number) * times + body[at + 4 * times :]
        words = f"{times} of the numbers of {name} → {number}"
    elif kind == 12:
        at = rng.randrange(len(body) + 1)
        body = body[:at]
        words = f"numbers cut off at byte {at}"
    else:
        body = bytes(rng.choice([0, 255]) for _ in range(1)) * len(body)
        words = f"every byte of every number {body[0] if body else 0}"
    return join_tensors(dump_json(header, indent=None), body), words


# --- tokenizer.json -----------------------------------------------------------------------------------------


def mutate_tokenizer(data: bytes, rng: Random) -> Mutated:
    """What a tokenizer of other hands has: gaps, other models, normalizers, padding."""
    try:
        found = json.loads(data)
        model, vocab = found["model"], found["model"]["vocab"]
        token = rng.choice(list(vocab))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return mutate_bytes(data, rng)
    kind = rng.randrange(13)
    if kind == 0:
        vocab[token] = rng.choice([len(vocab) + 5, 2**31, 2**32 - 1, 2**32, -1, 0, 1.5, "3", None, len(vocab) - 1])
        words = f"id of {token!r} → {vocab[token]!r}"
    elif kind == 1:
        del vocab[token]
        words = f"{token!r} gone"
    elif kind == 2:
        model["merges"] = rng.choice([[], None, [["a"]], ["a b c"], [["x", "y"]], 3, model.get("merges", [])[::2]])
        words = f"merges → {show(model['merges'])}"
    elif kind == 3:
        other = rng.choice(["WordLevel", "WordPiece", "Unigram", "X", None])
        found["model"] = {"type": other, "vocab": vocab, "unk_token": "<|pad|>"}
        if other == "Unigram":
            found["model"] = {"type": other, "vocab": [[name, -1.0] for name in vocab], "unk_id": 0}
        words = f"model {other}"
    elif kind == 4:
        strategy = rng.choice(["BatchLongest", {"Fixed": 10**9}, {"Fixed": 64}])
        found["padding"] = {"strategy": strategy, "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0,
                            "pad_id": rng.choice([0, 10**6]), "pad_token": "<|pad|>"}  # fmt: skip
        words = f"padding {strategy}"
    elif kind == 5:
        longest, stride = rng.choice([0, 1, 2**63]), rng.choice([0, 5])
        found["truncation"] = {
            "direction": "Right",
            "max_length": longest,
            "strategy": "LongestFirst",
            "stride": stride,
        }
        words = f"truncation to {longest}"
    elif kind == 6:
        found["normalizer"] = rng.choice(
            [
                {"type": "Lowercase"},
                {"type": "Prepend", "prepend": "x" * 1000},
                {"type": "NFKD"},
                {"type": "X"},
                {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "aa"},
                {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
            ]
        )
        words = f"normalizer {show(found['normalizer'])}"
    elif kind == 7:
        found["pre_tokenizer"] = rng.choice(
            [
                None,
                {"type": "Whitespace"},
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
                {"type": "Split", "pattern": {"Regex": "((a|b|c)+)+!"}, "behavior": "Isolated", "invert": False},
                {"type": "Digits", "individual_digits": True},
                {"type": "Sequence", "pretokenizers": []},
            ]
        )
        words = f"pre_tokenizer {show(found['pre_tokenizer'])}"
    elif kind == 8:
        found["decoder"] = rng.choice([None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "Fuse"},
                                       {"type": "Replace", "pattern": {"String": "a"}, "content": SCRIPT}])  # fmt: skip
        words = f"decoder {show(found['decoder'])}"
    elif kind == 9:
        number, content = (
            rng.choice([0, 3, len(vocab), 10**6, 2**32 - 1]),
            rng.choice(["x", "", SCRIPT, "<|bos|>", "the"]),
        )
        added = {"id": number, "content": content, "single_word": False, "lstrip": True, "rstrip": True,
                 "normalized": False, "special": rng.random() < 0.5}  # fmt: skip
        found["added_tokens"] = [*found.get("added_tokens", []), added]
        words = f"token {content!r} added at {number}"
    elif kind == 10:
        number = rng.choice([1, 10**6])
        found["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "z", "type_id": 0}}] * rng.choice([1, 999]),
            "pair": [], "special_tokens": {"z": {"id": "z", "ids": [number], "tokens": ["z"]}},
        }  # fmt: skip
        words = f"post_processor with id {number}"
    elif kind == 11:
        option, value = rng.choice([("dropout", 0.5), ("dropout", 9), ("unk_token", "zz"), ("byte_fallback", True),
                                    ("end_of_word_suffix", "</w>"), ("continuing_subword_prefix", "##")])  # fmt: skip
        model[option] = value
        words = f"model.{option} → {value!r}"
    else:
        changed, words = mutate_tree(found, rng)
        return dump_json(changed, indent=None), words
    return dump_json(found, indent=None), words


# --- text and pages -----------------------------------------------------------------------------------------


def mutate_text(data: bytes, rng: Random) -> Mutated:
    """Hostile words put into a text."""
    at = rng.randrange(len(data) + 1)
    new = rng.choice(
        [*TEXTS, "<|endoftext|>", "<|bos|>", "\n\n", "\r", "</iframe>", "<base href=//x>", "'sha256-AAAA='"]
    )
    return data[:at] + new.encode(errors="surrogatepass") + data[at:], f"{show(new)} put in at byte {at}"


def mix(*shares: tuple[float, Mutator]) -> Mutator:
    """One of several mutators, each with its share; one that cannot read what was changed before leaves it to bytes."""

    def mutate(data: bytes, rng: Random) -> Mutated:
        chosen = rng.choices([mutator for _, mutator in shares], [share for share, _ in shares])[0]
        try:
            return chosen(data, rng)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return mutate_bytes(data, rng)

    return mutate


AS_JSON = mix((0.8, mutate_json), (0.2, mutate_bytes))
AS_JSONL = mix((0.85, mutate_jsonl), (0.15, mutate_bytes))
AS_YAML = mix((0.85, mutate_yaml), (0.15, mutate_bytes))
AS_TENSORS = mix((0.85, mutate_tensors), (0.15, mutate_bytes))
AS_TOKENIZER = mix((0.6, mutate_tokenizer), (0.25, mutate_json), (0.15, mutate_bytes))
AS_TEXT = mix((0.5, mutate_text), (0.5, mutate_bytes))
