"""A sweep as one page: parallel coordinates, importances, the best settings, and every trial."""

import json
from shlex import quote
from typing import Any

from markupsafe import Markup, escape

from some_moe.glass.page.blocks import Block, Code, Number, Numbers, Page, Section, Svg, Table, Text
from some_moe.glass.page.render import render_page
from some_moe.lab.space import Axis
from some_moe.lab.sweep import format_value
from some_moe.layout import Column, format_number

WIDTH, HEIGHT, TOP, SIDE = 960, 400, 60, 60
MOST_LINES = 2_000  # trials that are drawn
HALO = 'stroke="var(--paper)" stroke-width="4" paint-order="stroke"'  # letters that lie on lines
BARS = 400  # wide: a phone shows them whole


def render_sweep(name: str, found: dict[str, Any]) -> str:
    """The page. found: what sweep.json holds."""
    axes = [Axis(**{**axis, "choices": tuple(axis["choices"])}) for axis in found["axes"]]
    trials, best, metric = found["trials"], found["best"], found["metric"].replace("_", " ")
    counts = {state: sum(trial["state"] == state for trial in trials) for state in ("done", "pruned", "failed")}
    items = [Number("trials", f"{len(trials)}", f"of {found['wanted']}")]
    items += [Number(state, str(count)) for state, count in counts.items() if count]
    if best is not None:
        items.append(Number(f"lowest {metric}", f"{best['value']:.4f}", best["name"]))
    first: list[Block] = [Numbers(items)]
    if best is not None:
        flags = " \\\n".join(f"--{key.replace('_', '-')} {format_flag(one)}" for key, one in best["settings"].items())
        first += [Text("The best settings, as flags:"), Code(flags)]
    sections = [Section("Outcome", first)]
    drawn = [trial for trial in trials if trial["value"] is not None and len(trial["settings"]) == len(axes)]
    if drawn:
        caption = (
            f"Each line is a trial; it crosses each axis at its setting, and the last at its {metric}, where low is "
            "good. Bright lines are the better half, dashed ones were stopped on the way; point at a line to read it."
        )
        sections.append(Section("Parallel coordinates", [Svg(draw_lines(axes, drawn, metric), caption)]))
    if found["importances"]:
        caption = f"How much of the difference between trials each setting accounts for ({found['importances_by']})."
        few = " With few trials this is rough." if len(drawn) < 20 else ""
        sections.append(Section("Importances", [Svg(draw_bars(found["importances"]), caption + few)]))
    columns = [
        Column("trial"),
        Column(metric, numeric=True),
        *(Column(axis.name, numeric=axis.kind != "choice") for axis in axes),
        Column("state"),
        Column("why", wraps=True),
    ]
    order = sorted(trials, key=lambda trial: (trial["value"] is None, trial["value"] or 0.0, trial["number"]))
    rows = [
        [trial["name"], format_number(trial["value"], ".4f")]
        + [format_value(trial["settings"][axis.name]) if axis.name in trial["settings"] else "–" for axis in axes]
        + [trial["state"], trial["reason"]]
        for trial in order
    ]
    sections.append(Section("Trials", [Table(columns, rows, "The best first; each is a run folder of that name.")]))
    seeds = ", ".join(map(str, found["seeds"]))
    summary = f"{len(axes)} settings searched for a low {metric}, each trial with seed {seeds}."
    return render_page(Page(name, "Sweep", summary, sections))


def format_flag(value: Any) -> str:
    return quote(value if isinstance(value, str) else json.dumps(value))


def draw_lines(axes: list[Axis], trials: list[dict[str, Any]], metric: str) -> Markup:
    """Parallel coordinates as SVG; the better a trial, the later it is drawn, and the brighter."""
    values = sorted(trial["value"] for trial in trials)
    low, high = values[0], values[-1] if values[-1] > values[0] else values[0] + 1e-9
    all_axes = [*axes, Axis(metric, "float", low, high)]
    step, bottom = (WIDTH - 2 * SIDE) / (len(all_axes) - 1), HEIGHT - 40
    places = [SIDE + step * number for number in range(len(all_axes))]

    def height(axis: Axis, value: Any) -> float:
        return bottom - axis.place(value) * (bottom - TOP)

    parts = []
    for trial in sorted(trials, key=lambda trial: -trial["value"])[-MOST_LINES:]:
        crossed = [*(trial["settings"][axis.name] for axis in axes), trial["value"]]
        dots = zip(places, all_axes, crossed, strict=True)
        points = " ".join(f"{x:.1f},{height(axis, value):.1f}" for x, axis, value in dots)
        rank = values.index(trial["value"]) / max(1, len(values) - 1)
        colour = f"hsl({30 + 190 * (1 - rank):.0f} 75% 48%)"
        told = ", ".join(f"{axis.name} {format_value(trial['settings'][axis.name])}" for axis in axes)
        title = escape(f"{trial['name']}: {metric} {trial['value']:.4f}; {told}")
        look = f'stroke="{colour}" stroke-opacity="{0.9 if rank <= 0.5 else 0.35}" stroke-width="2"'
        look += ' stroke-dasharray="6 4"' if trial["state"] == "pruned" else ""
        parts.append(f'<polyline fill="none" {look} points="{points}"><title>{title}</title></polyline>')
    for number, (axis, x) in enumerate(zip(all_axes, places, strict=True)):
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="currentColor"/>')
        middle = (axis.low * axis.high) ** 0.5 if axis.log else (axis.low + axis.high) / 2
        ticks = axis.choices or (axis.low, middle, axis.high)
        for tick in [one for one in ticks if axis.kind != "int" or one == int(one)]:
            y = height(axis, tick) + 4
            parts.append(f'<text x="{x + 5:.1f}" y="{y:.1f}" {HALO}>{escape(format_value(tick))}</text>')
        y = TOP - 14 - 18 * (number % 2)  # names of neighbours stand on two lines
        anchor = "start" if number == 0 else "end" if number == len(all_axes) - 1 else "middle"
        shown = escape(axis.name.rpartition(".")[2].replace("_", " "))
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="600">{shown}</text>')
    return frame(WIDTH, HEIGHT, parts, "Parallel coordinates of the trials", "min-width:720px")


def draw_bars(importances: dict[str, float]) -> Markup:
    parts, most = [], max(importances.values()) or 1.0
    for number, (name, share) in enumerate(sorted(importances.items(), key=lambda one: -one[1])):
        y = 40 * number
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(f'<text x="{BARS}" y="{y + 14}" text-anchor="end">{share:.0%}</text>')
        parts.append(
            f'<rect x="0" y="{y + 20}" width="{BARS * share / most:.1f}" height="10" fill="hsl(210 75% 48%)"/>'
        )
    return frame(BARS, 40 * len(importances), parts, "Importance of each setting", "max-width:600px")


def frame(width: int, height: int, parts: list[str], label: str, style: str) -> Markup:
    size = f'viewBox="0 0 {width} {height}" style="width:100%;{style}"'
    letters = 'font-size="13" fill="currentColor" font-family="inherit"'
    return Markup(f'<svg {size} role="img" aria-label="{label}"><g {letters}>{"".join(parts)}</g></svg>')
