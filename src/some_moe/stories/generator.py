"""The embedded corpus: short children's stories, told from a seed, without end and without any file.

`tell(index, seed)` is story number `index` of the book `seed`, and depends on nothing else. A story draws its
cast, place and things once, picks a plot, and tells each beat of it in one of several ways; all the words are
in plots.txt and lexicon.txt. Every word knows its part of speech, its role, and its part of the plot (`PARTS`).

Parts of speech (`POS`): "prep" is also the particle of a phrasal verb before its object (picked up the kite),
"part" is "to" before a verb, "not" and the possessive "'s"; auxiliaries and participles are "verb", except
before a noun, and "her" in "her kite" is "pron".

Roles (`ROLES`): somebody or something of this story, on its nouns, adjectives, names and pronouns. "both" is
hero and friend together, "stranger" somebody met on the way, "spot" somewhere in the place. "want", "trait",
"problem" and "lesson" are on all the words that state it, but for articles. Every other word has "".
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

FILES = tuple(Path(__file__).with_name(name) for name in ("lexicon.txt", "plots.txt"))  # both say how they are written


def read_sections(text: str) -> dict[str, str]:
    """What stands below each line "== name ==", by name and in order, without comments and empty lines."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    _, *parts = re.split(r"^== (\w+) ==\n", "\n".join(lines), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def read_entries(section: str) -> Iterator[tuple[str, str]]:
    """Keys and values of the lines "key = value"; a value goes on in the indented lines below it."""
    for entry in re.split(r"\n(?! )", section.strip()):
        key, _, value = entry.partition(" = ")
        yield key, " ".join(value.split())


LEXICON, PLOTS = (read_sections(file.read_text(encoding="utf-8")) for file in FILES)


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


POS = _set("noun propn pron verb adj adv det prep conj num part intj punct")
_STATED = _set("want problem trait lesson")
ROLES = _STATED | _set("hero friend both helper stranger place spot home object") | {""}
PARTS = ("opening", "want", "problem", "turn", "ending")


@dataclass(frozen=True, slots=True)
class Word:
    """One word or punctuation mark of a story, as it stands in `Story.text[start:end]`."""

    text: str
    start: int
    end: int
    pos: str
    role: str
    part: str


@dataclass(frozen=True, slots=True)
class Story:
    """A story, and all of its words and punctuation marks in order."""

    text: str
    words: tuple[Word, ...]


def tell(index: int, seed: int = 0) -> Story:
    """Story number `index` of the endless book `seed`."""
    return _Teller(Random(f"{seed}/{index}")).tell()


def tell_many(count: int, seed: int = 0, start: int = 0) -> Iterator[Story]:
    """`count` stories of the book `seed` in order, from number `start` on."""
    for index in range(start, start + count):
        yield tell(index, seed)


class Piece(NamedTuple):
    """A word of a plan. An opening quotation mark has the pos "quote" and its speakers as role."""

    text: str
    pos: str
    role: str


class Slot(NamedTuple):
    """Room in a plan for something of the story; those of its words that play no role take this one."""

    name: str
    role: str


class Choice(NamedTuple):
    """Phrases, of which one is told."""

    options: "tuple[Phrase, ...]"


Phrase = tuple[Piece | Slot | Choice, ...]
Row = dict[str, Phrase]
Facts = dict[str, tuple[Piece, ...]]
T = TypeVar("T")

_SYMBOL = re.compile(
    r"""\s+|(?P<open>[hfex]>[hfex]?")|(?P<slot>\{[a-z_.0-9]+\})|(?P<span><[a-z]+)|(?P<sign>[\[|\]>])"""
    r"""|(?P<word>[A-Za-z]+(?:-[a-z]+)*)(?P<marks>(?:/[a-z]+)*)|(?P<own>'s)|(?P<punct>[.,!?:"])"""
)
_CLOSE = Piece('"', "punct", "")
_SPEAKERS = {"h": "hero", "f": "friend", "e": "helper", "x": "stranger", "": ""}
_FIRST_PERSON, _SECOND_PERSON = _set("i me my mine myself"), _set("you your yours yourself")
_TOGETHER = _set("we us our ours ourselves")
_PERSONS = _FIRST_PERSON | _SECOND_PERSON | _TOGETHER
_FORMS = ("he", "him", "his", "himself")
_PRONOUNS = {"he": _FORMS, "she": ("she", "her", "her", "herself")}
_THINGS = {"it": "object", "they": "both", "them": "both", "their": "both"}
_NAMES_THINGS = _set("noun propn pron adj num")
_AN_BEFORE = re.compile(r"(?!one\b|once\b|use)[aeiou]|hour")
_IN_CONTEXT: dict[str, Callable[[str], str]] = {
    "to": lambda following: "part" if following == "verb" else "prep",
    "as": lambda following: "adv" if following in ("adj", "adv") else "prep",
    "particle": lambda following: "prep" if following == "det" or following in _NAMES_THINGS else "adv",
}
_BITS = 24


class _Parser:
    """Reads the notation of plots.txt."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def read(self, role: str, until: str = "") -> tuple[Phrase, str]:
        """The phrase up to one of the signs `until` or the end, and the sign; `role` is for all its words."""
        nodes: list[Piece | Slot | Choice] = []
        while self.position < len(self.text):
            match = _SYMBOL.match(self.text, self.position)
            if match is None:
                raise ValueError(f"cannot read {self.text[self.position :]!r} in the plan {self.text!r}")
            self.position = match.end()
            kind, symbol = match.lastgroup, match.group()
            if kind == "sign" and symbol == "[":
                options, mark = [], "|"
                while mark == "|":
                    option, mark = self.read(role, until="|]")
                    options.append(option)
                nodes.append(Choice(tuple(options)))
            elif kind == "sign":
                if symbol not in until:
                    raise ValueError(f"unexpected {symbol!r} in the plan {self.text!r}")
                return tuple(nodes), symbol
            elif kind == "span":
                nodes.extend(self.read(symbol[1:], until=">")[0])
            elif kind == "slot":
                nodes.append(Slot(symbol[1:-1], role))
            elif kind == "open":
                nodes.append(Piece('"', "quote", symbol[:-1]))
            elif kind in ("own", "punct"):
                nodes.append(Piece(symbol, "part" if kind == "own" else "punct", ""))
            elif kind == "marks":
                nodes.append(_name_word(match["word"], match["marks"].split("/")[1:], role))
        if until:
            raise ValueError(f"no {until!r} at the end of the plan {self.text!r}")
        return tuple(nodes), ""


def _name_word(word: str, marks: Sequence[str], role: str) -> Piece:
    """A word with its usual part of speech, unless a mark gives another."""
    pos = _vocabulary().get(word) or _vocabulary().get(word.lower())
    for mark in marks:
        if mark not in POS | ROLES:
            raise ValueError(f"{mark!r} after {word!r} is no part of speech and no role")
        pos, role = (mark, role) if mark in POS else (pos, mark)
    if pos is None:
        raise ValueError(f"{word!r} is not in the lexicon")
    return Piece(word, pos, _carry(word, pos, role))


def _carry(word: str, pos: str, role: str) -> str:
    """`role`, if such a word can carry it: "I" and "you" get theirs from who is speaking."""
    carries = pos in _NAMES_THINGS or (role in _STATED and pos not in ("det", "punct", "quote"))
    return role if carries and word.lower() not in _PERSONS else ""


@cache
def _vocabulary() -> dict[str, str]:
    """The usual part of speech of every word that plans may use."""
    usual = {name: "propn" for names in _entries("names").values() for name in names.split()}
    for pos, words in _entries("words").items():
        usual |= dict.fromkeys(words.split(), pos)
    return usual


@cache
def _entries(section: str) -> dict[str, str]:
    return dict(read_entries(LEXICON[section]))


@cache
def parse_phrase(text: str, role: str = "") -> Phrase:
    """The phrase written as `text`, its words in `role`; raises ValueError if a word or mark is unknown."""
    return _Parser(text).read(role)[0]


@cache
def _alternatives(text: str, role: str = "") -> tuple[Phrase, ...]:
    return tuple(parse_phrase(option.strip(), role) for option in text.split(";"))


@cache
def _table(text: str) -> tuple[Row, ...]:
    """The entries of a table by column."""
    head, *rows = ([cell.strip() for cell in row.split(";")] for row in text.split("//"))
    table: list[Row] = [{} for _ in rows]
    for column, *cells in zip(head, *rows, strict=True):
        names, _, role = column.partition(":")
        for number, name in enumerate(names.split("~")):
            for row, cell in zip(table, cells, strict=True):
                row[name] = parse_phrase(re.sub(r"(\S+)~(\S+)", rf"\{number + 1}", cell), role)
    return tuple(table)


@cache
def _tables() -> dict[str, tuple[Row, ...]]:
    texts = dict(_entries("tables"))
    kinds = texts.pop("kinds")
    for who in ("hero", "friend"):
        texts[who] = kinds.replace(":own", f":{who}").replace("{his}", f"{{{who}.his}}")
    return {name: _table(text) for name, text in texts.items()}


@cache
def _place(text: str) -> Row:
    """The ways to speak of a place that is written as preposition, article, [describing words] and noun."""
    preposition, full = text.split(maxsplit=1)
    name = parse_phrase(re.sub(r"\[.*?\]", "", full), "place")
    return {"name": name, "full": parse_phrase(full, "place"), "at": parse_phrase(preposition) + name}


@cache
def _plot(name: str) -> tuple[tuple[str, tuple[Phrase, ...]], ...]:
    """The beats of a plot: its part, with "?" if it can be left out, and the ways to tell it."""
    beats = [("opening", "{opening}"), *read_entries(PLOTS[name]), ("ending", "{closing}")]
    return tuple((part, _alternatives(text)) for part, text in beats)


class _Teller:
    """Tells one story: draws who, where and what once, and tells a plot with them."""

    def __init__(self, random: Random) -> None:
        self.draw_bits = random.getrandbits
        self.plot = self.pick_evenly(tuple(PLOTS))
        self.rows: dict[str, Row] = {}
        self.facts: Facts = {text: (Piece(text, "pron", role),) for text, role in _THINGS.items()}
        self.cast_hero_and_friend()
        self.cast_helper()
        self.set_scene()

    def tell(self) -> Story:
        """The story from opening to ending."""
        return _write(
            [
                (part.rstrip("?"), self.expand(self.pick_evenly(ways)))
                for part, ways in _plot(self.plot)
                if not (part.endswith("?") and self.draw_bits(1))
            ]
        )

    def pick_evenly(self, options: Sequence[T]) -> T:
        """One of the options, each as likely as another."""
        return options[len(options) * self.draw_bits(_BITS) >> _BITS]

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, the first over twice as often as the last, for words are not equally common."""
        share = self.draw_bits(_BITS)
        return options[len(options) * share * ((3 << _BITS) + 2 * share) // (5 << 2 * _BITS)]

    def cast_hero_and_friend(self) -> None:
        """Give each a name, a kind and pronouns that cannot be mistaken for the other's."""
        name, kind, pronoun = "", -1, ""
        for who in ("hero", "friend"):
            other_name, other_kind, other_pronoun = name, kind, pronoun
            pronoun = self.pick_evenly(("she", "he"))
            while name == other_name:
                name = self.pick(_entries("names")[pronoun].split())
            while kind == other_kind:
                kind = self.pick_kind(pronoun)
            self.rows[who] = _tables()[who][kind]
            self.call(who, (Piece(name, "propn", who),), pronoun, other_pronoun)
        self.facts |= {form: self.facts[f"hero.{form}"] for form in _FORMS}

    def pick_kind(self, pronoun: str) -> int:
        """A row of the kinds: three in four are animals, which come before girl and boy."""
        animals = len(_tables()["hero"]) - 2
        return self.pick(range(animals)) if self.draw_bits(2) else animals + (pronoun == "he")

    def cast_helper(self) -> None:
        """Somebody older, whom not every plot needs."""
        pronoun = self.pick_evenly(("she", "he"))
        text = self.pick(_entries("helpers")[pronoun].split(";"))
        text = text.replace("+", self.pick(_entries("names")["elder"].split()))
        self.call("helper", self.expand(parse_phrase(text, "helper")), pronoun, self.facts["he"][0].text)

    def call(self, who: str, pieces: tuple[Piece, ...], pronoun: str, other: str) -> None:
        """Settle name and pronouns of `who`; if `other` shares them, the name stands for "he" and "him"."""
        self.facts[who] = pieces
        for form, text in zip(_FORMS, _PRONOUNS[pronoun], strict=True):
            named = pronoun == other and form in ("he", "him")
            self.facts[f"{who}.{form}"] = pieces if named else (Piece(text, "pron", who),)

    def set_scene(self) -> None:
        """Draw the place and three spots in it."""
        places = _entries("places")
        kind = self.pick_evenly(_entries("settings").get(self.plot, " ".join(places)).split())
        self.rows["place"] = _place(self.pick(places[kind].split(";")))
        spots = list(_alternatives(_entries("spots")[kind], "spot"))
        self.rows["spot"] = {number: spots.pop(spots.index(self.pick(spots))) for number in "123"}

    def expand(self, phrase: Phrase) -> tuple[Piece, ...]:
        """The words of a phrase in this story."""
        pieces: list[Piece] = []
        for node in phrase:
            if isinstance(node, Piece):
                pieces.append(node)
            elif isinstance(node, Choice):
                pieces.extend(self.expand(self.pick_evenly(node.options)))
            else:
                words = self.facts.get(node.name) or self.fill(node.name)
                pieces.extend(_play(words, node.role) if node.role else words)
        return tuple(pieces)

    def fill(self, name: str) -> tuple[Piece, ...]:
        """Words for a slot: a turn of phrase, new each time, or a fact, which then stays as it is."""
        if name in (turns := _entries("turns")):
            return self.expand(self.pick(_alternatives(turns[name])))
        if name in (facts := _facts()):
            self.facts[name] = self.expand(self.pick(facts[name]))
        else:
            table, _, column = name.partition(".")
            if table not in self.rows:
                self.rows[table] = self.pick(_tables()[table])
            self.facts[name] = self.expand(self.rows[table][column or "name"])
        return self.facts[name]


@cache
def _facts() -> dict[str, tuple[Phrase, ...]]:
    facts = ((key.partition(":"), text) for key, text in _entries("facts").items())
    return {name: _alternatives(text, role) for (name, _, role), text in facts}


def _play(words: Sequence[Piece], role: str) -> list[Piece]:
    """The words, with `role` where they play none and can carry one."""
    return [word if word.role else word._replace(role=_carry(word.text, word.pos, role)) for word in words]


def _write(beats: Sequence[tuple[str, tuple[Piece, ...]]]) -> Story:
    """Write down the words of each part: spaces, capitals, "an", and the tags that the context decides."""
    chunks: list[str] = []
    words: list[Word] = []
    length, starts_sentence, space = 0, True, ""
    speakers: tuple[str, str] | None = None
    for part, pieces in beats:
        for (text, pos, role), following in zip(pieces, (*pieces[1:], _CLOSE), strict=True):
            next_space = " "
            if pos == "quote":
                speaker, _, listener = role.partition(">")
                speakers = _SPEAKERS[speaker], _SPEAKERS[listener]
                pos, role, starts_sentence, next_space = "punct", "", True, ""
            elif pos == "punct":
                space = ""
                if text == '"':
                    # A verb after speech is its tag, as in: "Why?" asked Pip.
                    speakers, starts_sentence = None, starts_sentence and following.pos != "verb"
                else:
                    starts_sentence = text in ".!?"
            else:
                if speakers and not role and pos == "pron":
                    role = _refer(text.lower(), *speakers)
                elif pos == "det" and text == "a" and _AN_BEFORE.match(following.text):
                    text = "an"
                elif text == "'s":
                    space, role = "", words[-1].role
                elif pos in _IN_CONTEXT:
                    pos = _IN_CONTEXT[pos](following.pos)
                if starts_sentence:
                    text, starts_sentence = text[0].upper() + text[1:], False
            start = length + len(space)
            length = start + len(text)
            chunks += (space, text)
            words.append(Word(text, start, length, pos, role, part))
            space = next_space
    return Story("".join(chunks), tuple(words))


def _refer(word: str, speaker: str, listener: str) -> str:
    """Whom a word of speech means: "I" the speaker, "you" the listener, "we" hero and friend."""
    if word in _TOGETHER:
        return "both" if {speaker, listener} == {"hero", "friend"} else ""
    return speaker if word in _FIRST_PERSON else listener if word in _SECOND_PERSON else ""
