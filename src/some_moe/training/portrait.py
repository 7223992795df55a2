"""How a run shows itself: a few lines in a terminal, a table and its loss curve in a notebook."""

from html import escape
from typing import TYPE_CHECKING, Any

from some_moe.layout import Style, format_table, number_columns

if TYPE_CHECKING:
    from some_moe.training.runs import Run

COLUMNS = ("epoch", "step", "train loss", "val loss", "perplexity")
WIDTH, HEIGHT, MARGIN = 480, 160, 8  # of the drawing, in pixels


def describe_run(run: "Run") -> str:
    """Name, state, the losses of each epoch, and where everything is."""
    lines = [_head(run)]
    if run.result is not None:
        rows = _rows(run.result)
        lines += format_table(number_columns(*COLUMNS), rows, width=None, style=Style(), indent="  ")
        lines.append(f"test loss {_figure(run.result.get('test_loss'))} nats per token")
    return "\n".join([*lines, f"everything is in {run.path}"])


def draw_run(run: "Run") -> str:
    """The same as HTML, with the loss curve. All text is escaped."""
    parts = [f"<b>{escape(_head(run))}</b>"]
    if run.result is not None:
        rows = [COLUMNS, *_rows(run.result), ("test", "", "", _figure(run.result.get("test_loss")), "")]
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        parts.append("<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>")
    parts += [draw_losses(run.metrics), f"<code>{escape(str(run.path))}</code>"]
    return "<div>" + "\n".join(parts) + "</div>"


def draw_losses(metrics: list[dict[str, Any]]) -> str:
    """An inline SVG: training loss as a thin line, validation loss as dots, from the first step to the last."""
    curves = {
        name: [(line["step"], line[name]) for line in metrics if isinstance(line.get(name), int | float)]
        for name in ("train_loss", "val_loss")
    }
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    last = max(step for step, _ in points) or 1
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)

    def place(step: float, loss: float) -> tuple[float, float]:
        across, down = step / last, (high - loss) / ((high - low) or 1.0)
        return MARGIN + across * (WIDTH - 2 * MARGIN), MARGIN + down * (HEIGHT - 2 * MARGIN)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curves["train_loss"]))
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#d55e00"/>'
        for x, y in (place(*point) for point in curves["val_loss"])
    )
    words = f"training loss (line) and validation loss (dots) over {last:,} steps, from {high:.4f} to {low:.4f}"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img"><title>{escape(words)}</title>'
        f'<polyline points="{line}" fill="none" stroke="#0072b2"/>{dots}</svg>'
    )


def _head(run: "Run") -> str:
    if run.result is None:
        return f"{run.config.name}: training or killed"
    return f"{run.config.name}: {run.result.get('status', 'finished')} after {run.result.get('steps', 0):,} steps"


def _rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            str(e["epoch"]),
            f"{e['step']:,}",
            *(_figure(e.get(name)) for name in ("train_loss", "val_loss", "perplexity")),
        )
        for e in result.get("epochs", [])
    ]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
