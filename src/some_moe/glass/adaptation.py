"""`some_moe.adapt`: how a run reads a stream while its keys move, as an object that shows itself, and as a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from some_moe.errors import in_a_sentence
from some_moe.glass.page.blocks import Number, Numbers, Page, Section, Svg, Table
from some_moe.glass.page.render import render_fragment, render_page
from some_moe.glass.page.sweep import WIDTH, frame
from some_moe.layout import ABSENT, Column, Style, format_number, format_table, number_column, wrap
from some_moe.system.reading import clean

if TYPE_CHECKING:
    from some_moe.training.runs import Run

Curves = dict[str, Sequence[float | None]]  # by reader, a value a chunk
MOST_POINTS = 180  # of a curve: more chunks are averaged
LONGEST_NAME = 16
HUES = {"still": "0 0% 50%", "gravity": "210 85% 45%", "random": "35 85% 45%", "bias": "150 65% 38%",
        "dynamic": "280 55% 55%", "trigram": "350 65% 50%"}  # fmt: skip
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 70, 150, 34, 300, 330


@in_a_sentence()
def adapt(run: "Run | str | Path", stream: Sequence[str | Path], **options: Any) -> "Adaptation":
    """Let the keys of a run move while it reads texts, one after another: each chunk is scored first.

    run: a run folder, or what `load` gave; it is not changed. stream: the texts. options: those of
    `some_moe.lab.adaptation.adapt`, which are the command's: controls, rates, valid, keep, chunk_tokens, changes, out
    (where the moved keys are saved as another run), checkpoint, device, say.
    """
    from some_moe.lab import adaptation

    return Adaptation(adaptation.adapt(run, stream, **options))


@dataclass(frozen=True, repr=False)
class Adaptation:
    """What `some adapt` prints. record: everything measured, as plain data."""

    record: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.record

    def __repr__(self) -> str:
        return self.format().rstrip("\n")

    def format(self, *, width: int | None = None, style: Style = Style()) -> str:  # noqa: B008 (frozen)
        """The table and what its words mean, for a terminal."""
        lines = [style.bold(self.title)]
        for table in self.tables():
            lines += format_table(table.columns, table.rows, width=width, style=style, indent="  ")
            lines += [*wrap(table.caption, width=min(width or 100, 100)), ""]
        return "\n".join(lines[:-1]) + "\n"

    def _repr_html_(self) -> str:
        return render_fragment(self.title, [*self.tables(), *self.drawings().values()])

    def page(self) -> str:
        """All of it as one self-contained HTML page."""
        found, best = self.record, {one["who"]: one for one in self.record["readers"]}
        gravity = best["gravity"]
        numbers = [
            Number("gravity ahead of still keys", show_gain(gravity), "nats a token, ± 95 % over chunks"),
            Number("lost on the old text", show_lost(gravity), found["keep"]),
            Number("keys have moved", format_number(gravity["drift"][-1], ".1%"), "of their length, on average"),
        ]
        sections = [Section("Outcome", [Numbers(numbers), *self.tables()])]
        sections += [Section(title, [drawing]) for title, drawing in self.drawings().items()]
        names = " → ".join(text["name"] for text in found["texts"])
        return render_page(
            Page(found["run"], "Adaptation", f"It read {names}, from step {found['step']:,} on.", sections)
        )

    @property
    def title(self) -> str:
        return str(clean(f"{self.record['run']}, step {self.record['step']:,}, reading with keys that move"))

    @property
    def legend(self) -> str:
        found = self.record
        text = (
            f"Nats a token; each chunk of about {found['chunk_tokens']:,} tokens was scored before anything moved. Old "
            f"text, after the stream: {clean(found['keep'])}; lost: against before. Drift: mean distance of keys from "
            "where they were, in lengths of a key. Moves: how many values may."
        )
        for who, many in found["tried"].items():
            told = ", ".join(f"{one['rate']:g}: {format_number(one['loss'], '.4f')}" for one in many)
            text += f" Rates of {who} and their loss on valid: {told}."
        return text + (f" Moved keys: {clean(found['out'])}." if found["out"] else "")

    def tables(self) -> list[Table]:
        """Losses, and how far each reader is ahead of still keys."""

        def of_text(place: int, show: Callable[[dict[str, Any]], str]) -> Column:
            name = str(clean(self.record["texts"][place]["name"]))
            short = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
            return Column(short, lambda one: show(one["texts"][place]), numeric=True)

        places, readers = range(len(self.record["texts"])), self.record["readers"]
        first = (Column("reader", lambda one: one["who"]), number_column("rate", "rate", "g"))
        losses = (
            *first,
            *(of_text(place, lambda text: format_number(text["loss"], ".4f")) for place in places),
            number_column("all", "loss", ".4f"),
            Column("old text", lambda one: format_number(one["kept"][-1], ".4f"), numeric=True),
            Column("lost", show_lost, numeric=True),
            Column("drift", lambda one: format_number(one["drift"][-1] if one["drift"] else None, ".4f"), numeric=True),
            number_column("moves", "moves", ",d"),
        )
        gains = (*first, *(of_text(place, show_gain) for place in places), Column("all", show_gain, numeric=True))
        ahead = "Ahead of still keys, in nats a token, ± 95 % over chunks."
        return [Table.of(losses, readers, self.legend), Table.of(gains, readers[1:], ahead)]

    def drawings(self) -> dict[str, Svg]:
        """Curves over the tokens read, by title."""
        readers = self.record["readers"]
        losses = {one["who"]: one["losses"] for one in readers}
        gains: Curves = {who: subtract(losses["still"], own) for who, own in losses.items() if who != "still"}
        by_keys = {who: own for who, own in gains.items() if who in ("gravity", "random")}
        drifts = {one["who"]: one["drift"] for one in readers if any(one["drift"])}
        found: dict[str, tuple[Curves, str]] = {
            "Ahead of still keys": (by_keys, "Nats a token; above 0 a reader is better than still keys.")
        }
        if len(gains) > len(by_keys):
            found["Beside what learns or counts"] = (gains, "The same with all readers.")
        found["Loss while it reads"] = (losses, "Nats a token of each chunk, before anything moved by it.")
        found["How far keys have moved"] = (drifts, "Mean distance from where keys were, in lengths of a key.")
        return {title: Svg(self.draw(curves, title), told) for title, (curves, told) in found.items()}

    def draw(self, curves: Curves, label: str) -> Markup:
        """Lines over the tokens read, with a mark where a text ends."""
        texts, points = self.record["texts"], {who: list[tuple[float, float]]() for who in curves}
        total, read, first, parts = sum(sum(text["sizes"]) for text in texts), 0.0, 0, []
        for number, text in enumerate(texts):
            sizes, group = np.array(text["sizes"], float), -(-len(text["sizes"]) * len(texts) // MOST_POINTS)
            for start in range(0, len(sizes), group):
                part = sizes[start : start + group]
                read += float(part.sum())
                for who, values in curves.items():
                    own = values[first + start : first + start + group]
                    if None not in own:
                        points[who].append(
                            (read - part.sum() / 2, float(np.average(np.array(own, float), weights=part)))
                        )
            first += len(sizes)
            x, begin = place(read, total), place(read - sizes.sum(), total)
            name, y = escape(str(clean(text["name"]))[:40]), TOP - 8 - 14 * (number % 2)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="currentColor" opacity=".3"/>'
            )
            parts.append(f'<text x="{begin + 4:.1f}" y="{y}">{name}</text>')
        heights = [y for line in points.values() for _, y in line] or [0.0]
        low, high = min(heights), max(heights)
        low, high = (low, high) if high > low else (low - 1e-6, high + 1e-6)

        def level(y: float) -> float:
            return BOTTOM - (y - low) / (high - low) * (BOTTOM - TOP)

        for tick in np.linspace(low, high, 5).tolist():
            parts.append(f'<text x="{LEFT - 6}" y="{level(tick) + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
        if low < 0 < high:
            parts.append(f'<path d="M{LEFT} {level(0):.1f}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".5"/>')
        for number, (who, line) in enumerate(points.items()):
            colour, where = f"hsl({HUES[who]})", " ".join(f"{place(x, total):.1f},{level(y):.1f}" for x, y in line)
            told = f"{who}: {line[0][1]:.4f} at first, {line[-1][1]:.4f} at last" if line else who
            look = f'fill="none" stroke="{colour}" stroke-width="2"'
            parts.append(f'<polyline {look} points="{where}"><title>{told}</title></polyline>')
            key = f'x="{WIDTH - RIGHT + 12}" y="{TOP + 12 + 20 * number}"'
            parts.append(f'<text {key} style="fill:{colour}" font-weight="600">{who}</text>')
        parts.append(f'<text x="{LEFT}" y="{BOTTOM + 22}">{total:,} tokens read</text>')
        return frame(WIDTH, HEIGHT, parts, label, "min-width:640px")


def place(tokens: float, total: float) -> float:
    return LEFT + tokens / total * (WIDTH - LEFT - RIGHT)


def subtract(left: Sequence[float | None], right: Sequence[float | None]) -> list[float | None]:
    pairs = zip(left, right, strict=True)
    return [None if a is None or b is None else a - b for a, b in pairs]


def show_gain(one: dict[str, Any]) -> str:
    within = "" if one["within"] is None else f" ± {one['within']:.4f}"
    return ABSENT if one["ahead"] is None else f"{round(one['ahead'], 4) + 0.0:+.4f}{within}"


def show_lost(one: dict[str, Any]) -> str:
    (before, *_, after) = one["kept"]
    return ABSENT if before is None or after is None else f"{after - before:+.4f}"
