"""The commands that need a model: train, eval, generate. Imported by `some_moe.cli` when one of them runs."""

import os
import secrets
import signal
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from some_moe.cli import Interrupts, Parser, look, read_numbers, read_words, suggest, write, write_json
from some_moe.config import Config, RunConfig
from some_moe.config.base import field_docs
from some_moe.errors import INTERRUPTED, TrainingStoppedError, UsageError, explain
from some_moe.system.phases import count_from_start
from some_moe.system.reading import clean, parse_yaml, read_text

if TYPE_CHECKING:
    from some_moe.training.runs import Run

# torchrun ends all processes when one fails: the others wait so long for the first, which says why.
FAREWELL_SECONDS = 10.0
SHORTEST_ROW, LONGEST_ROW = 2, 65_536
LONGEST_PROMPT = 1 << 20  # bytes


# --- settings on the command line -------------------------------------------------------------------------


def take_settings(arguments: list[str], prog: str) -> tuple[dict[str, Any], list[str]]:
    """Part `--model.top-k 2 --model.gains --train.clip=0`, wherever it stands, from the other words of a command.

    Settings come as {"model.top_k": "2", …}.
    """
    known = {"--" + name.replace("_", "-"): name for name in RunConfig.field_names() if "." in name}
    known |= {"--deterministic": "train.deterministic", "--name": "name"}
    changes: dict[str, Any] = {}
    others, words = [], list(arguments)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name = known.get(flag.replace("_", "-"))
        if name is None and flag.startswith("--") and "." in flag:
            raise UsageError(f"{flag} is not an option of `{prog}`{suggest(flag, [*known], prog)}")
        if name is None:
            others.append(word)
            continue
        if not equals:
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif is_switch(name):
                value = "true"
            else:
                raise UsageError(f"{flag} needs a value behind it; `some train --settings` says what it is")
        # Paths stay as the system gave them: it must find them again.
        changes[name] = _read_value(read_words(value) if name in ("train.sample_prompt", "data.separator") else value)
    return changes, others


def is_switch(name: str) -> bool:
    """Whether a dotted field is on or off: only such a one may stand alone."""
    room, _, field = name.rpartition(".")
    config = RunConfig if not room else RunConfig.model_fields[room].annotation
    annotation = config.model_fields[field].annotation  # type: ignore[union-attr]
    return annotation is bool or bool in get_args(annotation)


def _read_value(text: str) -> Any:
    """Lists, null and switches are read as YAML; numbers and names are left to the config, which knows their type."""
    if text.startswith("[") or text in ("null", "true", "false"):
        try:
            return parse_yaml(text)
        except ValueError:
            return text
    return text


def describe_settings() -> str:
    """Every field with its default and its meaning, room by room."""
    lines = []
    for room, field in RunConfig.model_fields.items():
        inner = field.annotation
        if not (isinstance(inner, type) and issubclass(inner, Config)):
            continue
        lines += ["", f"--{room}.*"]
        docs, defaults = field_docs(inner), inner().model_dump(mode="json")
        for name, default in defaults.items():
            shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
            words = [word for word in get_args(inner.model_fields[name].annotation) if isinstance(word, str)]
            choice = f"; one of {', '.join(words)}" if words else ""
            lines.append(f"  --{room}.{name.replace('_', '-')} ({shown}{choice})")
            lines.append(f"      {docs[name]}")
    return "\n".join(lines)


# --- some train -------------------------------------------------------------------------------------------


def train_model(arguments: list[str]) -> int:
    """Train a model. torchrun starts several processes with the same arguments: the first alone speaks."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0":
        return train_from_arguments(arguments)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            code = train_from_arguments(arguments)
        except Exception as error:
            found = explain(error)
            if found is None:
                raise
            code = found.code
    if code not in (0, INTERRUPTED):  # interrupted processes have met already
        time.sleep(FAREWELL_SECONDS)
    return code


def train_from_arguments(arguments: list[str]) -> int:
    prog = "some train"
    parser = Parser(
        prog,
        "Train a SoME model. Every setting can be given as --ROOM.FIELD VALUE; `some train --settings` lists them.",
    )
    parser.add_argument("--preset", metavar="NAME", help="start from smoke, demo, or any registered experiment")
    parser.add_argument("--config", metavar="FILE", help="start from a config.yaml")
    parser.add_argument("--out", metavar="DIR", help="the run folder (default: runs/NAME)")
    parser.add_argument("--resume", metavar="auto|PATH", help="continue the run in --out, or in PATH; or a checkpoint")
    parser.add_argument("--init-from", metavar="RUN", help="start with the weights and keys of a run or checkpoint")
    parser.add_argument("--accept-changes", action="store_true", help="resume with settings that were changed since")
    parser.add_argument("--dry-run", action="store_true", help="print config, size, memory and time; touch nothing")
    parser.add_argument("--settings", action="store_true", help="list every setting with its default and meaning")
    overrides, words = take_settings(arguments, prog)
    options = parser.parse(words)
    if options.settings:
        return write(describe_settings().lstrip() + "\n")
    config = resolve_config(options.preset, options.config, overrides)
    if options.dry_run:
        from some_moe.lab.estimate import estimate

        return write(estimate(config, options.out or f"runs/{config.name}"))

    from some_moe.system.claims import OBEYS, obey

    if OBEYS in os.environ:  # a worker of a shared queue has started it
        obey(os.environ[OBEYS])

    from some_moe.api import find_folder, train
    from some_moe.commands.tables import format_result
    from some_moe.lab.estimate import Place

    count_from_start()
    folder, _ = find_folder(options.out, config, options.resume)
    if options.resume and folder.exists() and not (options.preset or options.config):
        config = folder.read_config().override(overrides)  # what the command line does not name stays as it is there
    if config.train.compile and Place.find(config).device == "cpu":
        print("train.compile takes minutes on a CPU before the first step", file=sys.stderr)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # of its compiler, to its own authors
    places = {"out": options.out, "resume": options.resume, "init_from": options.init_from}
    try:
        run = train(config, **places, accept_changes=options.accept_changes)
    except TrainingStoppedError as stopped:
        handler = signal.getsignal(signal.SIGINT)
        if stopped.code == INTERRUPTED and isinstance(getattr(handler, "__self__", None), Interrupts):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends already: one more could only cut its sentence short
        raise
    assert run.result is not None
    return write(format_result(str(run.path), run.result, **look()))


def resolve_config(preset: str | None, file: str | None, overrides: dict[str, Any]) -> RunConfig:
    from some_moe.lab.registry.presets import find_preset

    if preset and file:
        raise UsageError(f"--preset {preset} and --config {file} exclude each other; give one of them")
    base = find_preset(preset) if preset else RunConfig.load(file) if file else RunConfig()
    return base.override(overrides)


# --- some eval and some generate --------------------------------------------------------------------------


def evaluate_run(arguments: list[str]) -> int:
    """Score a run on text."""
    parser = Parser("some eval", "Honest losses of a run on its own test split, or on any text. Keys stay still.")
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--data", nargs="+", metavar="F", help="files, folders or hf:OWNER/NAME: all of each is scored")
    parser.add_argument("--split", default="test", choices=("train", "valid", "test"), help="of the run's own data")
    parser.add_argument("--adapt", action="store_true", help="score each batch first, then let the keys move")
    parser.add_argument("--trigram", action="store_true", help="score a Kneser–Ney trigram of its train split too")
    parser.add_argument("--seq-lens", metavar="256,512", help="score it with rows cut or padded to each length")
    parser.add_argument("--tasks", metavar="A,B", help="tasks of lm-eval, or some_cloze, some_bytes, some_write")
    parser.add_argument("--limit", type=int, metavar="N", help="of --tasks: so many items each")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best (default), last, or step-N")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", action="store_true", help="print one object")
    add_branch_options(parser)
    options = parser.parse(arguments)
    if options.tasks is not None:
        from some_moe.commands.sharing import evaluate_harness

        return evaluate_harness(options)
    if options.limit is not None:
        raise UsageError(f"--limit {options.limit} is of --tasks; give some, or leave it out")
    if options.seq_lens is not None:
        return evaluate_lengths(options)
    texts = options.data or []
    for text in texts:
        if not text.startswith("hf:") and not Path(text).exists():
            raise UsageError(
                f"--data {text!r} does not exist; give a file or a folder, or leave it out for the run's own data"
            )
    if [options.adapt, options.trigram, len(texts) > 1].count(True) > 1:
        raise UsageError("--adapt and --trigram go with one text, and not together; see `some adapt` for more")

    from some_moe.commands.tables import format_evaluation, format_texts
    from some_moe.training.runs import load

    run = load(options.run, checkpoint=options.checkpoint, base=options.base, favour=options.favour)
    text = texts[0] if texts else None
    if options.adapt:
        from some_moe.lab.adaptation import score_moving

        record = score_moving(run, options.split, text, options.device)
    elif len(texts) > 1 or (texts and (run.path / "grown.json").exists()):
        from some_moe.growth.sharing import score_texts

        records = score_texts(run, texts, device=options.device)
        return write_json(records) if options.json else write(format_texts(records, **look()))
    else:
        record = run.evaluate(options.split, data=text, trigram=options.trigram, device=options.device)
    return write_json(record) if options.json else write(format_evaluation(record, **look()))


def add_branch_options(parser: Parser) -> None:
    parser.add_argument("--base", metavar="DIR", help="of a run with branches: where its base is, if it was moved")
    parser.add_argument("--favour", type=float, metavar="X", help="choose its branches more (or less) readily")


def evaluate_lengths(options: Namespace) -> int:
    """Score a run with its rows cut or padded to each length of --seq-lens."""
    bounds = {"least": SHORTEST_ROW, "most": LONGEST_ROW}
    lengths = read_numbers("--seq-lens", options.seq_lens, what="length", example="256,512,1024", **bounds)
    for name in ("data", "adapt", "trigram"):
        if getattr(options, name):
            raise UsageError(f"--seq-lens {options.seq_lens} and --{name} exclude each other; give one of them")

    from some_moe.training.runs import load

    load(options.run, checkpoint=options.checkpoint)  # one that is none is refused before torch is loaded

    from some_moe.commands.tables import format_lengths
    from some_moe.lab.lengths import score_run
    from some_moe.training.run_folder import drop_nan

    record = score_run(options.run, lengths, split=options.split, checkpoint=options.checkpoint, device=options.device)
    return write_json(drop_nan(record)) if options.json else write(format_lengths(record, **look()))


def open_run(options: Namespace) -> "Run":
    """The run that is asked for, on its device. A folder that is none is refused before torch is loaded."""
    from some_moe.training.runs import load

    run = load(options.run, checkpoint=options.checkpoint)

    from some_moe.config import TrainConfig
    from some_moe.training.machine import choose_machine

    device = choose_machine(TrainConfig(device=options.device)).device
    branches = {"base": options.base, "favour": options.favour}
    return load(run.path, checkpoint=options.checkpoint, device=str(device), **branches)


def generate_text(arguments: list[str]) -> int:
    """Let a run tell a story."""
    parser = Parser("some generate", "Text from a run, as it comes.")
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--prompt", metavar="TEXT", help="how the text begins (default: a new story)")
    parser.add_argument("--prompt-file", metavar="F", help="a file that holds the prompt; - is the standard input")
    parser.add_argument("--interactive", action="store_true", help="read prompts, one a line, until the input ends")
    parser.add_argument("--max-tokens", type=int, default=300, metavar="N", help="longest continuation (default 300)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, help="draw from the likeliest tokens of this mass (0.95)")
    parser.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens (default: all)")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="over 1 repeats less (1)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this; may be repeated")
    parser.add_argument("--seed", type=int, help="the same seed tells the same story (default: a new one each time)")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="how many texts of each prompt (default 1)")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best (default), last, or step-N")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    add_branch_options(parser)
    options = parser.parse(arguments)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    for name, value, good, cure in (
        ("--temperature", options.temperature, options.temperature == 0 or options.temperature >= 0.001,
         "use 0 for the likeliest token, or 0.001 and more"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "use more than 0 and at most 1"),
        ("--top-k", options.top_k, options.top_k is None or options.top_k > 0, "use 1 or more"),
        ("--repetition-penalty", options.repetition_penalty, 0.1 <= options.repetition_penalty <= 10, "use 0.1 to 10"),
        ("--max-tokens", options.max_tokens, 0 < options.max_tokens <= 100_000, "use 1 to 100,000"),
        ("--count", options.count, 0 < options.count <= 100_000, "use 1 to 100,000"),
        ("--seed", seed, 0 <= seed < 2**62, "use 0 to 2**62 - 1"),
    ):  # fmt: skip
        if not good:
            raise UsageError(f"{name} {value} is out of range; {cure}")
    prompts = read_prompts(options)
    stop = [read_words(word) for word in options.stop]
    if "" in stop:
        raise UsageError("--stop '' would stop before the first word; give a text, or leave it out")

    run = open_run(options)
    run.model  # noqa: B018 - what is wrong with it is said before anything else
    from some_moe.training.generation import MOST_ROWS

    seq_len, texts = run.config.data.seq_len, []
    if options.seed is None and options.temperature:
        print(f"seed {seed}: --seed {seed} repeats it", file=sys.stderr)
    chosen = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    more = chosen | {"max_new_tokens": options.max_tokens}
    for number, prompt in enumerate(prompts):
        length = 1 + len(run.tokenizer.encode(prompt))
        if number == 0 and length + options.max_tokens > seq_len:
            beyond = f"{length} tokens of prompt and {options.max_tokens} behind it are more than the {seq_len}"
            print(f"{beyond} that the model has learned from (data.seq_len); its text may decay", file=sys.stderr)
        first = seed + number * options.count
        for begin in range(first, first + options.count, MOST_ROWS):
            seeds = range(begin, min(first + options.count, begin + MOST_ROWS))
            told = tell(run, prompt, seeds, None if options.json else write, begin > seed, stop=stop, **more)
            texts += [{"prompt": prompt, "text": text, "seed": seed} for text, seed in zip(told, seeds, strict=True)]
    return write_json({"run": str(run.path), "step": run.step} | chosen | {"texts": texts}) if options.json else 0


def tell(
    run: "Run", prompt: str, seeds: range, show: Callable[[str], object] | None, follows: bool, **options: Any
) -> list[str]:
    """Continuations of a prompt, one for each seed, told side by side; the first one is shown as its words come.

    follows: whether something was shown before.
    """
    from some_moe.training.generation import stream_texts

    texts, begin = [""] * len(seeds), "\n" * follows + clean(prompt)
    if show:
        show(begin)
    for number, piece in stream_texts(run.model, run.tokenizer, prompt, seeds=seeds, **options):
        texts[number] += clean(piece)
        if show and number == 0:
            show(clean(piece))
            sys.stdout.flush()
    if show:
        show("\n" + "".join(f"\n{clean(prompt)}{text}\n" for text in texts[1:]))
    return texts


def read_prompts(options: Namespace) -> Iterable[str]:
    """What the texts begin with: one prompt, or one a line as they are typed."""
    given = [name for name in ("prompt", "prompt_file", "interactive") if getattr(options, name) not in (None, False)]
    if len(given) > 1:
        one, other = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise UsageError(f"{one} and {other} exclude each other; give one of them")
    if options.interactive:
        return (read_words(line.rstrip("\n")) for line in sys.stdin)
    if options.prompt_file == "-":
        text = sys.stdin.buffer.read(LONGEST_PROMPT + 1)
        try:
            return [text.decode("utf-8-sig").removesuffix("\n")]
        except UnicodeDecodeError as error:
            raise UsageError(f"the standard input is not UTF-8 text (byte {error.start}); convert it") from None
    if options.prompt_file is not None:
        return [read_text(options.prompt_file, LONGEST_PROMPT).removesuffix("\n")]
    return [read_words(options.prompt or "")]
