"""The commands `some bench layer`, `step` and `generate`. Imported by `some_moe.cli` when one of them runs."""

import json
import os
import re
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from some_moe.cli import MOST_DIGITS, Parser, on_terminal, read_numbers, shorten, terminal_width, write
from some_moe.commands.training import take_settings
from some_moe.config import ConfigError
from some_moe.errors import FailureError, UsageError
from some_moe.memory import refuse_too_large
from some_moe.system.files import is_stream, write_whole
from some_moe.system.reading import read_text

MOST_TOKENS = 1 << 24


def bench_layer(arguments: list[str]) -> int:
    """Time one layer's experts against their peers."""
    parser = Parser(
        "some bench layer",
        "Time one layer's experts, forward and backward, beside transformers' grouped experts, the torch idiom, a loop "
        "and a dense network. Each is checked against float64 first; who is wrong is not timed. On a GPU what can be "
        "recorded as a CUDA graph is, and replayed.",
    )
    parser.add_argument("--shapes", metavar="A,B", help="presets or experiments (GPU: A1,A4,V3,B3; CPU: demo,A1)")
    parser.add_argument("--tokens", metavar="N,M", help="tokens (GPU: 24576,32768; CPU: 2560)")
    parser.add_argument("--routing", default="both", choices=("balanced", "skewed", "both"), help="skewed: gini 0.9")
    parser.add_argument("--trainability", default="frozen", choices=("frozen", "lora", "full"), help="of the experts")
    parser.add_argument("--variants", metavar="A,B", help="time these alone, e.g. some triton,transformers-grouped")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="timing for each variant and case (1)")
    options, device = _parse(parser, arguments, "time compiled forms too")

    from some_moe.experts.grouped import ALIGNMENT
    from some_moe.lab.bench.layer import bench_layer as measure
    from some_moe.lab.bench.shapes import CPU_SHAPES, DEFAULT_SHAPES, find_shape
    from some_moe.lab.bench.tables import describe_layer_case, format_part, format_section, summarize_layers
    from some_moe.lab.bench.variants import list_variants

    on_gpu = device.type == "cuda"
    if not 0 < options.seconds <= 600:
        raise UsageError(f"--seconds {options.seconds} is out of range; use more than 0 and at most 600")
    shapes = _split(options.shapes) or (DEFAULT_SHAPES if on_gpu else CPU_SHAPES)
    configs = [find_shape(name, options.trainability) for name in shapes]
    multiple = 1 if options.trainability == "frozen" else ALIGNMENT
    tokens = _read_tokens(options.tokens or ("24576,32768" if on_gpu else "2560"), multiple)
    routings = ("balanced", "skewed") if options.routing == "both" else (options.routing,)
    variants = list_variants(device, on_gpu if options.compile is None else options.compile, _split(options.variants))
    report = _start_report("layer", arguments, options, device)
    report["cases"] = []
    parts = []
    for case in measure(configs, tokens, routings, variants, device, seconds=options.seconds, records=on_gpu):
        report["cases"].append(case)
        _save(options, report)
        parts.append(describe_layer_case(case))
        write(format_part(parts[-1], width=terminal_width(), color=on_terminal()) + "\n")
        sys.stdout.flush()  # shown as soon as it is measured, in a pipe too
    summary = summarize_layers(report["cases"])
    write(format_part(summary, width=terminal_width(), color=on_terminal()))
    sys.stdout.flush()  # what was measured is shown, also where the file finds no place
    _save(options, report, format_section(report, "One layer's experts", [summary, *parts]))
    if not any("ms" in row for case in report["cases"] for row in case["rows"]):
        raise FailureError(
            f"nothing could be timed: {_say_why(report['cases'])}; use fewer --tokens, or other --shapes"
        )
    return 0


def _say_why(cases: list[dict[str, Any]]) -> str:
    """What stood in the way, once each."""
    reasons = [case["failure"] for case in cases] + [row["status"] for case in cases for row in case["rows"]]
    return ", ".join(dict.fromkeys(reason.partition(":")[0] for reason in reasons if reason))


def bench_step(arguments: list[str]) -> int:
    """Time a whole training step."""
    parser = Parser(
        "some bench step",
        "Time a whole training step on full rows of random tokens: forward, backward, optimizer and gravity. Any "
        "setting of the shape can be changed by --ROOM.FIELD VALUE.",
    )
    parser.add_argument("--shape", default="A1", metavar="NAME", help="smoke, demo, or a registered experiment (A1)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="rows a step (32)")
    parser.add_argument("--seq-len", type=int, default=768, metavar="N", help="tokens a row (768)")
    parser.add_argument("--num-experts", type=int, metavar="E", help="experts a layer, instead of the shape's")
    parser.add_argument("--kernel", default="auto", metavar="NAME", help="as train.kernel (auto)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps timed (GPU: 30; CPU: 5)")
    parser.add_argument("--routing", default="natural", choices=("natural", "skewed"), help="skewed: gini 0.9")
    parser.add_argument("--profile", action="store_true", help="list the longest kernels")
    settings, words = take_settings(arguments, "some bench step")
    options, device = _parse(parser, words, "use torch.compile")

    from some_moe.lab.bench.step import bench_step as measure
    from some_moe.lab.bench.step import prepare_config
    from some_moe.lab.bench.tables import describe_step, format_part, format_section
    from some_moe.lab.registry.presets import find_preset

    config = prepare_config(
        find_preset(options.shape).override(settings),
        batch=_within(1, options.batch, 2**20, "--batch"),
        seq_len=_within(2, options.seq_len, 65_536, "--seq-len"),
        kernel=options.kernel,
        compile_model=options.compile,
        device=str(device),
        num_experts=options.num_experts,
    )
    steps = (30 if device.type == "cuda" else 5) if options.steps is None else options.steps
    _within(1, steps, 10**6, "--steps")
    refuse_too_large(config, device, training=True)
    report = _start_report("step", arguments, options, device)
    report["step"] = measure(config, steps=steps, routing=options.routing, profile=options.profile)
    parts = describe_step(report["step"])
    write("\n".join(format_part(part, width=terminal_width(), color=on_terminal()) for part in parts))
    sys.stdout.flush()
    _save(options, report, format_section(report, parts[0].title, parts))
    if report["step"].get("failure"):
        raise FailureError("the step could not be timed, for memory ran out; use a smaller --batch or --seq-len")
    return 0


def bench_generate(arguments: list[str]) -> int:
    """Time generation."""
    parser = Parser(
        "some bench generate",
        "Time generation on random weights, ours beside transformers' `generate` on the same ones (extra hf). Any "
        "setting of the shape can be changed by --ROOM.FIELD VALUE.",
    )
    parser.add_argument("--shape", default="A1", metavar="NAME", help="smoke, demo, or a registered experiment (A1)")
    parser.add_argument("--rows", default="1,64", metavar="N,M", help="texts at a time (1,64)")
    parser.add_argument("--prompt-tokens", type=int, default=16, metavar="N", help="tokens of the prompt (16)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens told behind it (256)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="calls timed, after two that are not (5)")
    settings, words = take_settings(arguments, "some bench generate")
    options, device = _parse(parser, words)
    rows = read_numbers("--rows", options.rows, what="number of rows", example="1,64", least=1, most=4096)
    _within(1, options.prompt_tokens, 65_536, "--prompt-tokens")
    _within(1, options.tokens, 65_536, "--tokens")
    _within(1, options.repeats, 10_000, "--repeats")

    from some_moe.lab.bench.generation import bench_generation
    from some_moe.lab.bench.tables import describe_generation, format_part, format_section
    from some_moe.lab.registry.presets import find_preset
    from some_moe.training.machine import choose_machine, settle_experts

    config = settle_experts(find_preset(options.shape).override(settings | {"train.device": str(device)}))
    refuse_too_large(config, device, training=False)
    report = _start_report("generate", arguments, options, device)
    model = choose_machine(config.train).make_model(config).eval()
    tellers = {}
    if find_spec("transformers"):
        from some_moe.hf.telling import make_tellers

        tellers = make_tellers(model, config)
    report["cases"], parts = [], []
    sizes = {"prompt_tokens": options.prompt_tokens, "tokens": options.tokens, "repeats": options.repeats}
    for case in bench_generation(model, rows, tellers, **sizes):
        report["cases"].append(case)
        parts.append(describe_generation(case))
        write(format_part(parts[-1], width=terminal_width(), color=on_terminal()) + "\n")
        sys.stdout.flush()
        _save(options, report)
    _save(options, report, format_section(report, f"Generation, {config.name}: {parts[0].title}", parts))
    return 0


def _parse(parser: Parser, arguments: list[str], compilation: str | None = None) -> tuple[Any, Any]:
    """The options, with those that all commands have, and the device."""
    if compilation is not None:
        parser.add_argument("--compile", action="store_true", default=None, help=f"{compilation} (default on a GPU)")
        parser.add_argument("--no-compile", action="store_false", dest="compile", help="do not")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", metavar="F", help="write everything to this file, as it comes")
    parser.add_argument("--markdown", metavar="F", help="append a section to this file")
    options = parser.parse(arguments)

    from some_moe.config import TrainConfig
    from some_moe.training.machine import choose_machine

    return options, choose_machine(TrainConfig(device=options.device)).device


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _read_tokens(text: str, multiple: int) -> list[int]:
    words = _split(text)
    for word in words or [text]:
        if not (word.isdecimal() and len(word) <= MOST_DIGITS and 1 <= int(word) <= MOST_TOKENS):
            most = f"of at most {MOST_TOKENS:,}"
            raise UsageError(f"--tokens {shorten(word)!r} is not a count of tokens {most}; give numbers such as 24576")
        if int(word) % multiple:
            raise UsageError(f"--tokens {word} is not a multiple of {multiple}, as the peers' weight gradients need")
    return [int(word) for word in words]


def _within(least: int, value: int, most: int, flag: str) -> int:
    if not least <= value <= most:
        raise UsageError(f"{flag} {value} is out of range; use {least} to {most:,}")
    return value


def _start_report(kind: str, arguments: list[str], options: Any, device: Any) -> dict[str, Any]:
    """What was run, when, and on what. A file that cannot be written is refused before anything is measured."""
    from some_moe.environment import describe_device, describe_environment

    for flag, name in (("--json", options.json), ("--markdown", options.markdown)):
        if name is not None and Path(name).is_dir():
            raise ConfigError(f"{flag} {name!r} is a folder; name a file in it")
        if name is not None and not is_stream(Path(name)) and not os.access(Path(name).parent, os.W_OK):
            raise ConfigError(f"{flag} {name!r} lies in a folder that does not exist or cannot be written; use another")
    # The names of output files change nothing that is measured.
    words = re.sub(r"\0--(json|markdown)[=\0][^\0]*", "", "".join(f"\0{word}" for word in arguments)).split("\0")[1:]
    environment = describe_environment(shlex.join(["some", "bench", kind, *words]), describe_device(device))
    environment |= {name: version(name) if find_spec(name) else None for name in ("triton", "transformers")}
    return {"benchmark": kind, "date": datetime.now(UTC).isoformat(timespec="seconds"), "environment": environment}


def _save(options: Any, report: dict[str, Any], section: str = "") -> None:
    """Write everything found so far, whole; a section goes to the end of a Markdown file, which need not exist yet."""
    from some_moe.training.run_folder import drop_nan

    if options.json is not None:
        write_whole(Path(options.json), json.dumps(drop_nan(report), indent=1, ensure_ascii=False) + "\n")
    if options.markdown is not None and section:
        path = Path(options.markdown)
        before = read_text(path).rstrip("\n") + "\n\n" if path.is_file() else "# Benchmarks\n\n"
        write_whole(path, before + section)
