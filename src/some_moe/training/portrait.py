"""How a run shows itself: a few lines in a terminal, and with its loss curve in a notebook."""

from html import escape
from typing import TYPE_CHECKING, Any

from some_moe.layout import Style, format_number, format_table, make_table, number_column

if TYPE_CHECKING:
    from some_moe.training.runs import Run

COLUMNS = (
    number_column("epoch", "epoch"),
    number_column("step", "step", ","),
    number_column("train loss", "train_loss", ".4f"),
    number_column("val loss", "val_loss", ".4f"),
    number_column("perplexity", "perplexity", ".4f"),
)
WIDTH, HEIGHT, MARGIN = 480, 160, 8  # of the drawing, in pixels


def describe_run(run: "Run") -> str:
    """Name, state, the losses of each epoch, and where everything is."""
    found = run.result
    if found is None:
        return f"{run.config.name}: training or killed\neverything is in {run.path}"
    lines = [f"{run.config.name}: {found['status']} after {found['steps']:,} steps"]
    lines += format_table(*make_table(COLUMNS, found["epochs"]), width=None, style=Style(), indent="  ")
    lines += [f"test loss {format_number(found['test_loss'], '.4f')} nats per token", f"everything is in {run.path}"]
    return "\n".join(lines)


def draw_run(run: "Run") -> str:
    """The same as HTML, all text escaped, with the loss curve as an inline SVG."""
    return f"<pre>{escape(describe_run(run))}</pre>{draw_losses(run.metrics)}"


def draw_losses(metrics: list[dict[str, Any]]) -> str:
    """Training loss as a line, validation loss as dots, from first step to last; empty where there is none."""
    train, valid = (
        [(line["step"], line[name]) for line in metrics if isinstance(line.get(name), float)]
        for name in ("train_loss", "val_loss")
    )
    if not train and not valid:
        return ""
    steps, losses = zip(*train, *valid, strict=True)
    last, low, high = max(*steps, 1), min(losses), max(losses)

    def place(step: int, loss: float) -> tuple[float, float]:
        down = (high - loss) / ((high - low) or 1.0)
        return MARGIN + step / last * (WIDTH - 2 * MARGIN), MARGIN + down * (HEIGHT - 2 * MARGIN)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in train))
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#d55e00"/>' for x, y in (place(*point) for point in valid)]
    words = f"training loss (line) and validation loss (dots) over {last:,} steps, between {low:.4f} and {high:.4f}"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img"><title>{words}</title>'
        f'<polyline points="{line}" fill="none" stroke="#0072b2"/>{"".join(dots)}</svg>'
    )
