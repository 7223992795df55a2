"""Benchmarks as tables, for a terminal and for Markdown, from the plain records that `some bench` makes."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from some_moe.layout import Column, Style, Table, format_markdown, format_table, make_table, number_column, text_column

RECORDED = "ms: recorded once as a CUDA graph and replayed, as training replays its steps"
ALIGNED = "loads are multiples of {}, for grouped_mm's weight gradient; ours takes any"

Row = dict[str, Any]
number = partial(number_column, absent="")


class Part(NamedTuple):
    """One table, with a title and a line of what else to know."""

    title: str
    facts: str
    table: Table


def format_part(part: Part, *, width: int | None, color: bool) -> str:
    """A part as the terminal shows it."""
    style = Style(color)
    lines = [style.bold(part.title)] + [part.facts] * bool(part.facts)
    if part.table.rows:
        lines += format_table(*part.table, width=width, style=style, indent="  ")
    return "\n".join(lines) + "\n"


def format_section(report: Row, title: str, parts: Sequence[Part]) -> str:
    """One section of a results file: what its numbers depend on, then every part, the first without its title."""
    found = report["environment"]
    versions = [f"{name} {found[name]}" for name in ("torch", "triton", "transformers") if found[name]]
    lines = [
        f"## {title}, {report['date'][:10]}, {found['device']}",
        "",
        f"- {report['date']}, {', '.join(versions)}, commit {found['commit'] or 'unknown'}",
        f"- `{found['command']}`",
    ]
    for place, part in enumerate(parts):
        lines += ["", f"### {part.title}"] * (place > 0) + ["", f"{part.facts}."] * bool(part.facts)
        if part.table.rows:
            lines += ["", *format_markdown(*part.table)]
    return "\n".join(lines) + "\n"


def _rate(row: Row) -> str:
    """Floating-point operations a second, in tera or giga."""
    tera = row.get("tflops")
    if tera is None:
        return ""
    return f"{tera:.0f} T" if tera >= 100 else f"{tera:.1f} T" if tera >= 1 else f"{tera * 1e3:.1f} G"


def _note(row: Row) -> str:
    if row["not_recorded"]:
        return f"launched from Python, not recorded: {row['not_recorded']}"
    return row["reason"] or ("" if row["same_function"] else "the ceiling: as many operations, another function")


LAYER = (
    text_column("variant", "name"),
    Column("ms", lambda row: f"{row['ms']:.3f}" if "ms" in row else row["status"].upper(), numeric=True),
    Column("quartiles", lambda row: f"{row['ms_low']:.3f}–{row['ms_high']:.3f}" if "ms" in row else ""),
    Column("FLOP/s", _rate, numeric=True),
    number("of peak", "share_of_peak", ".1%"),
    number("× fastest peer", "speed_to_fastest_peer", ".2f"),
    Column("MiB", lambda row: "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}", numeric=True),
    number("compile s", "compile_seconds", ".1f"),
    Column("error", lambda row: f"{max(row['errors'].values()):.0e}" if row["errors"] else ""),
    Column("note", _note, wraps=True),
)
SUMMARY = (text_column("case", "case"), *LAYER[:6], text_column("the peer", "peer"), number("its ms", "peer_ms", ".3f"))


def describe_layer_case(case: Row) -> Part:
    """All variants of one case, fastest first, then those that were not timed."""
    shape = case["shape"]
    facts = [
        f"d {shape['d_model']}, f {shape['d_ffn']}, {shape['num_experts']} experts, {shape['top_k']} a token",
        f"forward and backward, experts {case['trainability']}; {case['flops'] / 1e9:.4g} GFLOP in {case['dtype']}",
    ]
    if case["failure"]:
        facts.append(case["failure"])
    else:
        facts.append(f"gini {case['usage']['gini']:.3f}, {case['usage']['experts_used']} experts in use")
        facts += [ALIGNED.format(case["load_multiple"])] * (case["load_multiple"] > 1)
        facts += [RECORDED] * (case["launch"] == "recorded")
    rows = sorted(case["rows"], key=lambda row: row.get("ms", math.inf))
    return Part(_title(case), "; ".join(facts), make_table(LAYER, rows))


def summarize_layers(cases: Sequence[Row]) -> Part:
    """One line a case: the fastest of ours beside the fastest peer that computes the same function."""
    rows = []
    for case in cases:
        timed = sorted((row for row in case["rows"] if row["same_function"] and "ms" in row), key=lambda row: row["ms"])
        ours = next((row for row in timed if row["is_ours"]), None)
        peer: Row = next((row for row in timed if not row["is_ours"]), {})
        if ours is not None:
            rows.append(ours | {"case": _title(case), "peer": peer.get("name", ""), "peer_ms": peer.get("ms")})
    return Part("Ours beside the fastest peer that computes the same function", "", make_table(SUMMARY, rows))


def _title(case: Row) -> str:
    return f"{case['shape']['name']}, {case['tokens']:,} tokens, {case['routing']} routing"


TOLD = (
    text_column("by", "name"),
    Column("ms a token", lambda row: f"{row['ms']:.3f}" if "ms" in row else row["status"].upper(), numeric=True),
    number("tokens/s", "tokens_per_second", ",.0f"),
    number("× fastest peer", "speed_to_fastest_peer", ".2f"),
    number("same tokens", "same", ".0%"),
    text_column("note", "reason"),
)


def describe_generation(case: Row) -> Part:
    """Ours and the others on so many rows."""
    rows = case["rows"]
    title = f"{rows:,} row{'s' * (rows > 1)}, {case['prompt_tokens']:,} tokens of prompt, {case['tokens']:,} behind it"
    return Part(title, "whole calls, the likeliest token each time", make_table(TOLD, case["found"]))


KERNELS = (
    Column("kernel", lambda row: _shorten(row["kernel"])),
    number("calls", "calls", ".4g"),
    number("ms a step", "ms", ".3f"),
    number("share", "share", ".1%"),
)


def _shorten(kernel: str, most: int = 60) -> str:
    """A kernel's name without its template arguments, cut where it is still too long."""
    name = " ".join(kernel.split("<")[0].removeprefix("void ").split()) or kernel
    return name if len(name) <= most else name[: most - 1] + "…"


def describe_step(record: Row) -> list[Part]:
    """Everything a step's record says, and its longest kernels where it was profiled."""
    model, found, get = record["model"], "ms" in record, record.get
    facts = [
        ("model", f"{record['total_parameters']:,} parameters, {record['trainable_parameters']:,} trained"),
        ("experts", model["ffn"] == "some" and f"{model['num_experts']} a layer in {model['expert_dtype']}, "
         f"{model['top_k']} a token"),
        ("batch", f"{record['batch_size']} rows of {record['seq_len']} tokens, nothing padded"),
        ("kernel", f"{record['kernel']}, {record['precision']}, {'compiled' if record['compiled'] else 'eager'}"),
        ("failed", record["failure"]),
        ("step", found and f"{record['ms']:.2f} ms ({record['ms_low']:.2f}–{record['ms_high']:.2f}, "
         f"{record['repeats']} steps)"),
        ("tokens/s", found and f"{record['tokens_per_second']:,.0f}"),
        ("FLOP/s", found and f"{_rate(record)}, at {record['flops_per_token'] / 1e6:,.1f} MFLOP a token"),
        ("MFU", get("mfu") and f"{record['mfu']:.1%} of the chip's dense bf16 peak"),
        ("memory", get("peak_bytes") and f"{record['peak_bytes'] / 2**30:.2f} GiB at its peak"),
        ("compilation", get("compile_seconds") and f"{record['compile_seconds']:.1f} s, not in the times"),
        ("gini", get("gini") and f"{min(record['gini']):.3f} to {max(record['gini']):.3f} over the layers"),
    ]  # fmt: skip
    title = f"One training step of {record['name']}, {record['routing']} routing"
    parts = [Part(title, "", Table((Column(""), Column("")), [fact for fact in facts if fact[1]]))]
    if profile := record.get("profile"):
        time_in_all = f"of {profile['ms']:.3f} ms a step in all"
        parts.append(Part("The longest kernels", time_in_all, make_table(KERNELS, profile["kernels"])))
    return parts
