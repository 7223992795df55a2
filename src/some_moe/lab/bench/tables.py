"""Benchmarks as tables, for a terminal and for Markdown, from the plain records that `some bench` makes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from some_moe.layout import (
    Column,
    Style,
    Table,
    format_markdown,
    format_number,
    format_table,
    make_table,
    number_column,
    text_column,
)

MIB = 1 << 20
GIB = 1 << 30
PASSES = {"forward": "forward", "backward": "backward alone", "both": "forward and backward"}
RECORDED = "ms: recorded once as a CUDA graph and replayed, as training replays its steps"
LAUNCHED = {"recorded": RECORDED, "both": f"{RECORDED}; eager ms: launched from Python"}
ALIGNED = "loads are multiples of {}, which grouped_mm's weight gradient needs; ours takes any"

Row = dict[str, Any]
number = partial(number_column, absent="")


def _rate(row: Row) -> str:
    """Floating-point operations a second, in tera or giga."""
    tera = row.get("tflops")
    if tera is None:
        return ""
    return f"{tera:.0f} T" if tera >= 100 else f"{tera:.1f} T" if tera >= 1 else f"{tera * 1e3:.1f} G"


RATE = Column("FLOP/s", _rate, numeric=True)
OF_PEAK = number("of peak", "share_of_peak", ".1%")

# --- one layer's experts ----------------------------------------------------------------------------------


def _milliseconds(row: Row) -> str:
    if row["status"] != "ok":
        return "WRONG" if row["status"] == "wrong" else row["status"]
    return "–" if row["not_recorded"] else f"{row['ms']:.3f}"


def _note(row: Row) -> str:
    if row["reason"]:
        return str(row["reason"])
    if row["not_recorded"]:
        return f"not recorded: {row['not_recorded']}"
    return "" if row["same_function"] else "the ceiling: as many operations, another function"


LAYER = (
    text_column("variant", "name"),
    Column("ms", _milliseconds, numeric=True),
    Column("quartiles", lambda row: f"{row['ms_low']:.3f}–{row['ms_high']:.3f}" if row.get("ms_low") else ""),
    RATE,
    OF_PEAK,
    number("× fastest peer", "speed_to_fastest_peer", ".2f"),
    number("eager ms", "ms_eager", ".3f"),
    number("× eager peer", "eager_speed_to_fastest_peer", ".2f"),
    Column("MiB", lambda row: f"{row['peak_bytes'] / MIB:,.0f}" if row["peak_bytes"] is not None else "", numeric=True),
    number("compile s", "compile_seconds", ".1f"),
    Column("error", lambda row: f"{max(row['errors'].values()):.0e}" if row["errors"] else ""),
    Column("note", _note, wraps=True),
)
SUMMARY = (
    text_column("shape", "shape"),
    number("tokens", "tokens", ","),
    text_column("routing", "routing"),
    text_column("fastest of ours", "ours"),
    number("ms", "ours_ms", ".3f"),
    RATE,
    OF_PEAK,
    text_column("fastest peer", "peer"),
    number("its ms", "peer_ms", ".3f"),
    number("speed", "speed", ".2f", "×"),
    number("eager ms", "eager_ours_ms", ".3f"),
    number("its eager ms", "eager_peer_ms", ".3f"),
    number("eager speed", "eager_speed", ".2f", "×"),
    text_column("note", "note", wraps=True),
)


def layer_table(case: Row) -> Table:
    """All variants of one case, fastest first, then those that were not timed."""
    return make_table(LAYER, [_hide(row) for row in sorted(case["rows"], key=lambda row: row.get("ms", float("inf")))])


def _hide(row: Row) -> Row:
    """Leave out the numbers of a call that could not be recorded where others were: they are of another kind.

    And where all is eager, the eager columns: the first ones have that already.
    """
    hidden: tuple[str, ...] = ()
    if row["not_recorded"]:
        hidden = ("ms_low", "tflops", "share_of_peak")
    elif not row["recorded"]:
        hidden = ("ms_eager", "eager_speed_to_fastest_peer")
    return {name: value for name, value in row.items() if name not in hidden}


def layer_summary(cases: Sequence[Row]) -> Table:
    """One line a case: the fastest of ours beside the fastest peer, recorded beside recorded, eager beside eager."""
    rows = []
    for case in cases:
        row = {"shape": case["shape"]["name"], "note": case["failure"] or ""}
        row |= {name: case[name] for name in ("tokens", "routing")}
        has_recordings = any(row["recorded"] for row in case["rows"])
        row |= compare_best(case, "ms_recorded" if has_recordings else "ms_eager")
        if has_recordings and case["launch"] == "both":
            row |= {f"eager_{name}": value for name, value in compare_best(case, "ms_eager").items()}
        rows.append(row)
    return make_table(SUMMARY, rows)


def compare_best(case: Row, ms: str) -> Row:
    """The fastest of ours and the fastest peer that computes the same function, by the time called `ms`."""
    timed = sorted((row for row in case["rows"] if row["same_function"] and row.get(ms)), key=lambda row: row[ms])
    ours: Row = next((row for row in timed if row["is_ours"]), {})
    peer: Row = next((row for row in timed if not row["is_ours"]), {})
    return {
        "ours": ours.get("name", ""),
        "ours_ms": ours.get(ms),
        "tflops": ours.get("tflops"),
        "share_of_peak": ours.get("share_of_peak"),
        "peer": peer.get("name", ""),
        "peer_ms": peer.get(ms),
        "speed": peer[ms] / ours[ms] if ours and peer else None,
    }


def explain_launch(cases: Sequence[Row]) -> list[str]:
    """What the times of these cases are, where something was recorded."""
    return [LAUNCHED[launch] for launch in dict.fromkeys(case["launch"] for case in cases) if launch in LAUNCHED]


def describe_layer_case(case: Row) -> tuple[str, str]:
    """A title, and a line of what else to know."""
    shape = case["shape"]
    title = f"{shape['name']}, {case['tokens']:,} tokens, {case['routing']} routing"
    facts = (
        f"d {shape['d_model']}, f {shape['d_ffn']}, {shape['num_experts']} experts, {shape['top_k']} a token; "
        f"{PASSES[case['pass']]}, experts {case['trainability']}; {case['flops'] / 1e9:.4g} GFLOP"
    )
    if case["failure"]:
        return title, f"{facts}; {case['failure']}"
    usage, roof = case["usage"], case["roofline"]
    facts += f" in {case['dtype']}; gini {usage['gini']:.3f}, {usage['experts_used']} experts in use"
    if case["load_multiple"] > 1:
        facts += f"; {ALIGNED.format(case['load_multiple'])}"
    if roof is not None:
        facts += (
            f"; no less than {roof['ms']:.3f} ms on this chip "
            f"(arithmetic {roof['flops_ms']:.3f}, memory {roof['bytes_ms']:.3f})"
        )
    return title, "; ".join([facts, *explain_launch([case])])


def format_layer_case(case: Row, *, width: int | None, style: Style) -> str:
    """What `some bench layer` prints of one case."""
    title, facts = describe_layer_case(case)
    table = format_table(*layer_table(case), width=width, style=style, indent="  ") if case["rows"] else []
    return "\n".join([style.bold(title), facts, *table]) + "\n\n"


def format_layer_summary(cases: Sequence[Row], *, width: int | None, style: Style) -> str:
    """What `some bench layer` prints last."""
    lines = [style.bold("Ours beside the fastest peer that computes the same function"), *explain_launch(cases)]
    lines += format_table(*layer_summary(cases), width=width, style=style, indent="  ")
    return "\n".join(lines) + "\n"


def layer_markdown(report: Row) -> str:
    """One section of a results file: the summary, then every case."""
    lines = markdown_head(report, "One layer's experts")
    lines += [f"{sentence}.\n" for sentence in explain_launch(report["cases"])]
    lines += format_markdown(*layer_summary(report["cases"]))
    for case in report["cases"]:
        title, facts = describe_layer_case(case)
        lines += ["", f"### {title}", "", f"{facts}.", ""]
        if case["rows"]:
            lines += format_markdown(*layer_table(case))
    return "\n".join(lines) + "\n"


# --- a whole step -----------------------------------------------------------------------------------------

SPENT = (number("ms a step", "ms", ".3f"), number("share", "share", ".1%"))
CLASSES = (text_column("class", "class"), *SPENT)
KERNELS = (
    Column("kernel", lambda row: _shorten(row["kernel"])),
    text_column("class", "class"),
    number("calls", "calls", ".4g"),
    *SPENT,
)


def _shorten(kernel: str, most: int = 60) -> str:
    """A kernel's name without its template arguments, cut where it is still too long."""
    name = " ".join(kernel.split("<")[0].removeprefix("void ").split()) or kernel
    return name if len(name) <= most else name[: most - 1] + "…"


def step_title(record: Row) -> str:
    return f"One training step of {record['name']}, {record['routing']} routing"


def step_facts(record: Row) -> list[tuple[str, str]]:
    """Name and value of everything a step's record says."""
    model = record["model"]
    experts = f"{model['num_experts']} a layer in {model['expert_dtype']}, {model['top_k']} a token"
    facts = [
        ("model", f"{record['total_parameters']:,} parameters, {record['trainable_parameters']:,} trained"),
        ("experts", experts if model["ffn"] == "some" else ""),
        ("batch", f"{record['batch_size']} rows of {record['seq_len']} tokens, nothing padded"),
        ("kernel", f"{record['kernel']}, {record['precision']}, {'compiled' if record['compiled'] else 'eager'}"),
        ("failed", record["failure"] or ""),
    ]
    if not record["failure"]:
        low, high, ginis = record["ms_low"], record["ms_high"], record["gini"]
        memory = None if record["peak_bytes"] is None else record["peak_bytes"] / GIB
        facts += [
            ("step", f"{record['ms']:.2f} ms ({low:.2f}–{high:.2f}, {record['repeats']} steps)"),
            ("tokens/s", f"{record['tokens_per_second']:,.0f}"),
            ("FLOP/s", f"{_rate(record)}, at {record['flops_per_token'] / 1e6:,.1f} MFLOP a token"),
            ("MFU", format_number(record["mfu"], ".1%", " of the chip's dense bf16 peak", absent="")),
            ("memory", format_number(memory, ".2f", " GiB at its peak", absent="")),
            ("compilation", format_number(record["compile_seconds"], ".1f", " s, not in the times", absent="")),
            ("gini", f"{min(ginis):.3f} to {max(ginis):.3f} over the layers" if ginis else ""),
        ]
    return [(name, value) for name, value in facts if value]


def profile_tables(record: Row) -> list[tuple[str, Table]]:
    """Where the time goes, by class, and the longest kernels; nothing without a profile."""
    profile = record.get("profile")
    if not profile:
        return []
    return [
        ("Where the time goes", make_table(CLASSES, profile["classes"])),
        ("The longest kernels", make_table(KERNELS, profile["kernels"])),
    ]


def format_step(record: Row, *, width: int | None, style: Style) -> str:
    """What `some bench step` prints."""
    facts = step_facts(record)
    longest = max(len(name) for name, _ in facts)
    lines = [style.bold(step_title(record))]
    lines += [f"  {style.dim(name.ljust(longest))}  {value}" for name, value in facts]
    for title, table in profile_tables(record):
        lines += ["", style.bold(title), *format_table(*table, width=width, style=style, indent="  ")]
    return "\n".join(lines) + "\n"


def step_markdown(report: Row) -> str:
    """One section of a results file: a step, and its profile where there is one."""
    record = report["step"]
    lines = markdown_head(report, step_title(record))
    lines += format_markdown((Column(""), Column("")), step_facts(record))
    for _, table in profile_tables(record):
        lines += ["", *format_markdown(*table)]
    return "\n".join(lines) + "\n"


def markdown_head(report: Row, title: str) -> list[str]:
    """A section's heading, and what its numbers depend on."""
    found = report["environment"]
    versions = [f"{name} {found[name]}" for name in ("torch", "triton", "transformers") if found[name]]
    return [
        f"## {title}, {report['date'][:10]}, {found['device']}",
        "",
        f"- {report['date']}, {', '.join(versions)}, commit {found['commit'] or 'unknown'}",
        f"- `{found['command']}`",
        "",
    ]
