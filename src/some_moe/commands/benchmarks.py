"""The commands `some bench layer` and `some bench step`. Imported by `some_moe.cli` when one of them runs."""

import sys
from dataclasses import asdict
from typing import Any

from some_moe.cli import Parser, UsageError, on_terminal, terminal_width, write

QUICK_SECONDS = 0.2


def bench_layer(arguments: list[str]) -> int:
    """Time one layer's experts against their peers."""
    parser = Parser(
        "some bench layer",
        "Time one layer's experts beside transformers' grouped experts, the torch idiom, a loop and a dense network. "
        "Each is checked against float64 first; who is wrong is not timed.",
    )
    parser.add_argument(
        "--shapes", metavar="A,B", help="smoke, demo, or registered experiments (GPU: A1,A4,V3,B3; CPU: demo,A1)"
    )
    for name, meaning in (
        ("--d-model", "model width"),
        ("--d-ffn", "hidden width of an expert"),
        ("--num-experts", "experts"),
        ("--top-k", "experts a token"),
    ):
        parser.add_argument(name, type=int, metavar="N", help=f"{meaning}, instead of the shape's")
    parser.add_argument("--tokens", metavar="N,M", help="tokens (GPU: 24576,32768; CPU: 2560)")
    parser.add_argument("--routing", default="both", choices=("balanced", "skewed", "both"), help="skewed: gini 0.9")
    parser.add_argument(
        "--pass", dest="which", default="both", choices=("forward", "backward", "both"), help="what is timed"
    )
    parser.add_argument("--trainability", default="frozen", choices=("frozen", "lora", "full"), help="of the experts")
    parser.add_argument("--lora-rank", type=int, default=8, metavar="R", help="rank with --trainability lora (8)")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="all",
        choices=("all", "peers", "none"),
        help="time compiled forms too: of all (default on a GPU), of the peers alone, or none (default on a CPU)",
    )
    parser.add_argument("--no-compile", action="store_const", const="none", dest="compile", help="--compile none")
    parser.add_argument(
        "--launch",
        choices=("recorded", "eager", "both"),
        help="time replays of a recording (a CUDA graph), calls launched from Python, or both (GPU: both; CPU: eager)",
    )
    parser.add_argument("--variants", metavar="A,B", help="time these alone, e.g. some triton,transformers-grouped")
    parser.add_argument("--seconds", type=float, metavar="S", help="timing for each variant, launch and case (1)")
    parser.add_argument("--quick", action="store_true", help=f"--seconds {QUICK_SECONDS}")
    _add_common(parser)
    options = parser.parse(arguments)

    from some_moe.lab.bench.layer import LayerSettings
    from some_moe.lab.bench.layer import bench_layer as measure
    from some_moe.lab.bench.record import append_section, check_output, describe_benchmark, write_report
    from some_moe.lab.bench.shapes import CPU_SHAPES, DEFAULT_SHAPES, SIZES, find_shape
    from some_moe.lab.bench.tables import format_layer_case, format_layer_summary, layer_markdown
    from some_moe.lab.bench.variants import list_variants
    from some_moe.layout import Style

    device = _choose_device(options.device)
    on_gpu = device.type == "cuda"
    sizes = {name: getattr(options, name) for name in SIZES}
    usual = ("A1",) if set(sizes.values()) != {None} else DEFAULT_SHAPES if on_gpu else CPU_SHAPES
    settings = LayerSettings(
        shapes=[find_shape(name).resize(**sizes) for name in _split(options.shapes or "") or usual],
        tokens=_read_tokens(options.tokens or ("24576,32768" if on_gpu else "2560")),
        routings=("balanced", "skewed") if options.routing == "both" else (options.routing,),
        which=options.which,
        trainability=options.trainability,
        lora_rank=_at_least(1, options.lora_rank, "--lora-rank"),
        launch=_read_launch(options.launch, on_gpu),
        seconds=_read_seconds(options.seconds, options.quick),
    )
    compiled = options.compile or ("all" if on_gpu else "none")
    variants = list_variants(device, compiled, _split(options.variants or ""))
    json_file, markdown_file = check_output(options.json, "--json"), check_output(options.markdown, "--markdown")
    report: dict[str, Any] = describe_benchmark("layer", arguments, device)
    report |= {"settings": asdict(settings), "cases": []}
    look: dict[str, Any] = {"width": terminal_width(), "style": Style(on_terminal())}
    for case in measure(settings, variants, device):
        report["cases"].append(case)
        write_report(json_file, report)
        write(format_layer_case(case, **look))
        sys.stdout.flush()  # shown as soon as it is measured, in a pipe too
    append_section(markdown_file, layer_markdown(report))
    return write(format_layer_summary(report["cases"], **look))


def bench_step(arguments: list[str]) -> int:
    """Time a whole training step."""
    parser = Parser(
        "some bench step",
        "Time a whole training step on full rows of random tokens: forward, backward, optimizer and gravity.",
    )
    parser.add_argument("--shape", default="A1", metavar="NAME", help="smoke, demo, or a registered experiment (A1)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="rows a step (32)")
    parser.add_argument("--seq-len", type=int, default=768, metavar="N", help="tokens a row (768)")
    parser.add_argument("--num-experts", type=int, metavar="E", help="experts a layer, instead of the shape's")
    parser.add_argument("--kernel", default="auto", metavar="NAME", help="as train.kernel (auto)")
    parser.add_argument(
        "--expert-dtype", choices=("float32", "bfloat16"), help="of frozen experts (what the shape says)"
    )
    parser.add_argument("--compile", action="store_true", default=None, help="use torch.compile (default on a GPU)")
    parser.add_argument("--no-compile", action="store_false", dest="compile", help="do not")
    parser.add_argument("--steps", type=int, metavar="N", help="steps timed (GPU: 30; CPU: 5)")
    parser.add_argument("--routing", default="natural", choices=("natural", "skewed"), help="skewed: gini 0.9")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    _add_common(parser)
    options = parser.parse(arguments)

    from some_moe.lab.bench.record import append_section, check_output, describe_benchmark, write_report
    from some_moe.lab.bench.step import bench_step as measure
    from some_moe.lab.bench.step import prepare_config
    from some_moe.lab.bench.tables import format_step, step_markdown
    from some_moe.lab.registry.presets import find_preset
    from some_moe.layout import Style

    device = _choose_device(options.device)
    on_gpu = device.type == "cuda"
    config = prepare_config(
        find_preset(options.shape),
        batch=_at_least(1, options.batch, "--batch"),
        seq_len=_at_least(2, options.seq_len, "--seq-len"),
        kernel=options.kernel,
        compile_model=options.compile,
        device=str(device),
        num_experts=options.num_experts,
        expert_dtype=options.expert_dtype,
    )
    steps = _at_least(1, options.steps, "--steps") if options.steps is not None else 30 if on_gpu else 5
    json_file, markdown_file = check_output(options.json, "--json"), check_output(options.markdown, "--markdown")
    report = describe_benchmark("step", arguments, device)
    report["step"] = measure(config, steps=steps, routing=options.routing, profile=options.profile)
    write_report(json_file, report)
    append_section(markdown_file, step_markdown(report))
    return write(format_step(report["step"], width=terminal_width(), style=Style(on_terminal())))


# --- reading the options ----------------------------------------------------------------------------------


def _add_common(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", metavar="F", help="write everything to this file, as it comes")
    parser.add_argument("--markdown", metavar="F", help="append a section to this file")


def _choose_device(name: str) -> Any:
    from some_moe.config import TrainConfig
    from some_moe.training.machine import choose_machine

    return choose_machine(TrainConfig(device=name)).device


def _split(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _read_tokens(text: str) -> list[int]:
    words = _split(text)
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise UsageError(f"--tokens {word!r} is not a count of tokens; give numbers such as 24576,32768")
    if not words:
        raise UsageError(f"--tokens {text!r} names no count; give numbers such as 24576,32768")
    return [int(word) for word in words]


def _read_seconds(seconds: float | None, quick: bool) -> float:
    if seconds is None:
        return QUICK_SECONDS if quick else 1.0
    if not 0 < seconds <= 600:
        raise UsageError(f"--seconds {seconds} is out of range; use more than 0 and at most 600")
    return seconds


def _read_launch(launch: str | None, on_gpu: bool) -> str:
    if launch is None:
        return "both" if on_gpu else "eager"
    if launch != "eager" and not on_gpu:
        raise UsageError(f"--launch {launch} needs a CUDA GPU; leave it out, or use --launch eager")
    return launch


def _at_least(least: int, value: int, flag: str) -> int:
    if value < least:
        raise UsageError(f"{flag} {value} is out of range; use {least} or more")
    return value
