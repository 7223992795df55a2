"""Benchmarks as tables, for a terminal and for Markdown, from the plain records that `some bench` makes."""

from collections.abc import Callable, Sequence
from typing import Any

from some_moe.layout import Column, Style, format_table

MIB = 1 << 20
GIB = 1 << 30
PASSES = {"forward": "forward", "backward": "backward alone", "both": "forward and backward"}
RECORDED = "ms: recorded once as a CUDA graph and replayed, as training replays its steps"
LAUNCHED = {"recorded": RECORDED, "both": f"{RECORDED}; eager ms: launched from Python"}

ALIGNED = "loads are multiples of {}, which grouped_mm's weight gradient needs; ours takes any"

Row = dict[str, Any]
Table = tuple[list[Column], list[list[str]]]


def make_table(cells: Sequence[tuple[Column, Callable[[Row], str]]], rows: Sequence[Row]) -> Table:
    """Columns and cells; a column in which nothing is said is left out."""
    filled = [(column, [say(row) for row in rows]) for column, say in cells]
    filled = [(column, texts) for column, texts in filled if any(texts)]
    return [column for column, _ in filled], [list(row) for row in zip(*(texts for _, texts in filled), strict=True)]


def markdown_table(table: Table) -> list[str]:
    columns, rows = table
    lines = [_bar(column.header for column in columns), _bar("---:" if column.numeric else "---" for column in columns)]
    return lines + [_bar(cell.replace("|", "\\|") for cell in row) for row in rows]


def _bar(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _number(name: str, pattern: str, factor: float = 1.0) -> Callable[[Row], str]:
    """Print a row's number, or nothing where the row has none."""
    return lambda row: "" if row.get(name) is None else pattern.format(row[name] * factor)


def _rate(row: Row) -> str:
    """Floating-point operations a second, in tera or giga."""
    tera = row.get("tflops")
    if tera is None:
        return ""
    return f"{tera:.0f} T" if tera >= 100 else f"{tera:.1f} T" if tera >= 1 else f"{tera * 1e3:.1f} G"


# --- one layer's experts ----------------------------------------------------------------------------------


def _milliseconds(row: Row) -> str:
    if row["status"] != "ok":
        return "WRONG" if row["status"] == "wrong" else row["status"]
    return "–" if row["not_recorded"] else f"{row['ms']:.3f}"


def _comparable(say: Callable[[Row], str]) -> Callable[[Row], str]:
    """Say nothing of a row that could not be recorded where others were: its numbers are of another kind."""
    return lambda row: "" if row["not_recorded"] else say(row)


def _beside_recordings(say: Callable[[Row], str]) -> Callable[[Row], str]:
    """Say it where recordings were asked for; where all is eager, the first columns have it already."""
    return lambda row: say(row) if row["recorded"] or row["not_recorded"] else ""


def _note(row: Row) -> str:
    if row["reason"]:
        return str(row["reason"])
    if row["not_recorded"]:
        return f"not recorded: {row['not_recorded']}"
    return "" if row["same_function"] else "the ceiling: as many operations, another function"


LAYER_CELLS: tuple[tuple[Column, Callable[[Row], str]], ...] = (
    (Column("variant"), lambda row: row["name"]),
    (Column("ms", numeric=True), _milliseconds),
    (Column("quartiles"), _comparable(lambda row: f"{row['ms_low']:.3f}–{row['ms_high']:.3f}" if "ms" in row else "")),
    (Column("FLOP/s", numeric=True), _comparable(_rate)),
    (Column("of peak", numeric=True), _comparable(_number("share_of_peak", "{:.1%}"))),
    (Column("× fastest peer", numeric=True), _number("speed_to_fastest_peer", "{:.2f}")),
    (Column("eager ms", numeric=True), _beside_recordings(_number("ms_eager", "{:.3f}"))),
    (Column("× eager peer", numeric=True), _beside_recordings(_number("eager_speed_to_fastest_peer", "{:.2f}"))),
    (Column("MiB", numeric=True), _number("peak_bytes", "{:,.0f}", 1 / MIB)),
    (Column("compile s", numeric=True), _number("compile_seconds", "{:.1f}")),
    (Column("error"), lambda row: f"{max(row['errors'].values()):.0e}" if row["errors"] else ""),
    (Column("note", wraps=True), _note),
)


def explain_launch(cases: Sequence[Row]) -> list[str]:
    """What the times of these cases are, where something was recorded."""
    return [LAUNCHED[launch] for launch in dict.fromkeys(case["launch"] for case in cases) if launch in LAUNCHED]


def layer_table(case: Row) -> Table:
    """All variants of one case, fastest first, then those that were not timed."""
    return make_table(LAYER_CELLS, sorted(case["rows"], key=lambda row: row.get("ms", float("inf"))))


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
    lines = [style.bold(title), facts]
    if case["rows"]:
        lines += format_table(*layer_table(case), width=width, style=style, indent="  ")
    return "\n".join(lines) + "\n\n"


def best_rows(case: Row, ms: str) -> tuple[Row | None, Row | None]:
    """The fastest of ours and the fastest peer that computes the same function, by the time called `ms`."""
    timed = [row for row in case["rows"] if row.get(ms) is not None and row["same_function"]]
    ours = [row for row in timed if row["is_ours"]]
    peers = [row for row in timed if not row["is_ours"]]
    return min(ours, key=lambda row: row[ms], default=None), min(peers, key=lambda row: row[ms], default=None)


def compare_best(case: Row, ms: str) -> Row:
    """The two of `best_rows` as the cells of one line."""
    ours, peer = best_rows(case, ms)
    return {
        "ours": "" if ours is None else ours["name"],
        "ours_ms": None if ours is None else ours[ms],
        "tflops": None if ours is None else ours["tflops"],
        "share_of_peak": None if ours is None else ours["share_of_peak"],
        "peer": "" if peer is None else peer["name"],
        "peer_ms": None if peer is None else peer[ms],
        "speed": None if ours is None or peer is None else peer[ms] / ours[ms],
    }


def layer_summary(cases: Sequence[Row]) -> Table:
    """One line a case: the fastest of ours beside the fastest peer, recorded beside recorded, eager beside eager."""
    rows = []
    for case in cases:
        has_recordings = any(row["recorded"] for row in case["rows"])
        row = compare_best(case, "ms_recorded" if has_recordings else "ms_eager")
        eager = compare_best(case, "ms_eager") if has_recordings and case["launch"] == "both" else {}
        rows.append({"case": case, **row, "eager": eager})
    cells: tuple[tuple[Column, Callable[[Row], str]], ...] = (
        (Column("shape"), lambda row: row["case"]["shape"]["name"]),
        (Column("tokens", numeric=True), lambda row: f"{row['case']['tokens']:,}"),
        (Column("routing"), lambda row: row["case"]["routing"]),
        (Column("fastest of ours"), lambda row: row["ours"]),
        (Column("ms", numeric=True), _number("ours_ms", "{:.3f}")),
        (Column("FLOP/s", numeric=True), _rate),
        (Column("of peak", numeric=True), _number("share_of_peak", "{:.1%}")),
        (Column("fastest peer"), lambda row: row["peer"]),
        (Column("its ms", numeric=True), _number("peer_ms", "{:.3f}")),
        (Column("speed", numeric=True), _number("speed", "{:.2f}×")),
        (Column("eager ms", numeric=True), lambda row: _number("ours_ms", "{:.3f}")(row["eager"])),
        (Column("its eager ms", numeric=True), lambda row: _number("peer_ms", "{:.3f}")(row["eager"])),
        (Column("eager speed", numeric=True), lambda row: _number("speed", "{:.2f}×")(row["eager"])),
        (Column("note", wraps=True), lambda row: row["case"]["failure"] or ""),
    )
    return make_table(cells, rows)


def format_layer_summary(cases: Sequence[Row], *, width: int | None, style: Style) -> str:
    """What `some bench layer` prints last."""
    lines = [style.bold("Ours beside the fastest peer that computes the same function"), *explain_launch(cases)]
    lines += format_table(*layer_summary(cases), width=width, style=style, indent="  ")
    return "\n".join(lines) + "\n"


# --- a whole step -----------------------------------------------------------------------------------------


def step_facts(record: Row) -> list[tuple[str, str]]:
    """Name and value of everything a step's record says."""
    model = record["model"]
    facts = [
        ("model", f"{record['total_parameters']:,} parameters, {record['trainable_parameters']:,} trained"),
        ("batch", f"{record['batch_size']} rows of {record['seq_len']} tokens, nothing padded"),
        ("kernel", f"{record['kernel']}, {record['precision']}, {'compiled' if record['compiled'] else 'eager'}"),
    ]
    if model["ffn"] == "some":
        experts = f"{model['num_experts']} a layer in {model['expert_dtype']}, {model['top_k']} a token"
        facts.insert(1, ("experts", experts))
    if record["failure"]:
        return [*facts, ("failed", record["failure"])]
    facts += [
        ("step", f"{record['ms']:.2f} ms ({record['ms_low']:.2f}–{record['ms_high']:.2f}, {record['repeats']} steps)"),
        ("tokens/s", f"{record['tokens_per_second']:,.0f}"),
        ("FLOP/s", f"{_rate(record)}, at {record['flops_per_token'] / 1e6:,.1f} MFLOP a token"),
    ]
    if record["mfu"] is not None:
        facts.append(("MFU", f"{record['mfu']:.1%} of the chip's dense bf16 peak"))
    if record["peak_bytes"] is not None:
        facts.append(("memory", f"{record['peak_bytes'] / GIB:.2f} GiB at its peak"))
    if record["compile_seconds"] is not None:
        facts.append(("compilation", f"{record['compile_seconds']:.1f} s, not in the times"))
    if record["gini"]:
        facts.append(("gini", f"{min(record['gini']):.3f} to {max(record['gini']):.3f} over the layers"))
    return facts


def profile_tables(profile: Row) -> tuple[Table, Table]:
    """Where the time goes: by class, and the longest kernels."""
    time = (
        (Column("ms a step", numeric=True), _number("ms", "{:.3f}")),
        (Column("share", numeric=True), _number("share", "{:.1%}")),
    )
    by_class = make_table(((Column("class"), lambda row: row["class"]), *time), profile["classes"])
    cells: tuple[tuple[Column, Callable[[Row], str]], ...] = (
        (Column("kernel"), lambda row: _shorten(row["kernel"])),
        (Column("class"), lambda row: row["class"]),
        (Column("calls", numeric=True), _number("calls", "{:.4g}")),
        *time,
    )
    return by_class, make_table(cells, profile["kernels"])


def _shorten(kernel: str, most: int = 60) -> str:
    """A kernel's name without its template arguments, cut where it is still too long."""
    name = " ".join(kernel.split("<")[0].removeprefix("void ").split()) or kernel
    return name if len(name) <= most else name[: most - 1] + "…"


def format_step(record: Row, *, width: int | None, style: Style) -> str:
    """What `some bench step` prints."""
    facts = step_facts(record)
    longest = max(len(name) for name, _ in facts)
    lines = [style.bold(f"One training step of {record['name']}, {record['routing']} routing")]
    lines += [f"  {style.dim(name.ljust(longest))}  {value}" for name, value in facts]
    if record.get("profile"):
        by_class, kernels = profile_tables(record["profile"])
        lines += ["", style.bold("Where the time goes")]
        lines += format_table(*by_class, width=width, style=style, indent="  ")
        lines += ["", style.bold("The longest kernels")]
        lines += format_table(*kernels, width=width, style=style, indent="  ")
    return "\n".join(lines) + "\n"


# --- Markdown ---------------------------------------------------------------------------------------------


def markdown_head(report: Row, title: str) -> list[str]:
    """A section's heading, and what its numbers depend on."""
    found = report["environment"]
    versions = [f"torch {found['torch']}"]
    versions += [f"{name} {found[name]}" for name in ("triton", "transformers") if found[name]]
    return [
        f"## {title}, {report['date'][:10]}, {found['device']}",
        "",
        f"- {report['date']}, {', '.join(versions)}, commit {found['commit'] or 'unknown'}",
        f"- `{found['command']}`",
        "",
    ]


def layer_markdown(report: Row) -> str:
    """One section of a results file: the summary, then every case."""
    lines = markdown_head(report, "One layer's experts")
    lines += [f"{sentence}.\n" for sentence in explain_launch(report["cases"])]
    lines += markdown_table(layer_summary(report["cases"]))
    for case in report["cases"]:
        title, facts = describe_layer_case(case)
        lines += ["", f"### {title}", "", f"{facts}.", ""]
        if case["rows"]:
            lines += markdown_table(layer_table(case))
    return "\n".join(lines) + "\n"


def step_markdown(report: Row) -> str:
    """One section of a results file: a step, and its profile where there is one."""
    record = report["step"]
    lines = markdown_head(report, f"One training step of {record['name']}, {record['routing']} routing")
    lines += markdown_table(([Column(""), Column("")], [[name, value] for name, value in step_facts(record)]))
    if record.get("profile"):
        by_class, kernels = profile_tables(record["profile"])
        lines += ["", *markdown_table(by_class), "", *markdown_table(kernels)]
    return "\n".join(lines) + "\n"
