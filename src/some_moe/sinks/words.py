"""A run in words: an evaluation as a line, the whole of it as a few, and with its curve for a notebook."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from some_moe.layout import format_number


def describe_evaluation(epoch: int, step: int, found: dict[str, Any]) -> str:
    """One line on an evaluation; found: its figures by name."""
    text = f"epoch {epoch}, step {step}: val loss {found['loss']:.4f}, perplexity {found['perplexity']:.2f}"
    if found["loss_padded"] is not None:
        text += f" (over padding too: {found['loss_padded']:.4f})"
    if found["layers"]:
        middle = found["layers"][len(found["layers"]) // 2]
        used = f"{middle['experts_used']}/{middle['num_experts']} experts"
        text += f", middle layer gini {middle['gini']:.3f}, {used}"
    return text


def describe_run(name: str, result: dict[str, Any] | None, path: Path) -> str:
    """Name, state, the losses of each epoch, and where everything is."""
    where = f"everything is in {path}"
    if result is None:
        return f"{name}: training or killed\n{where}"
    lines = [f"{name}: {result['status']} after {result['steps']:,} steps"]
    for epoch in result["epochs"]:
        losses = ((loss, format_number(epoch[loss], ".4f")) for loss in ("train_loss", "val_loss", "perplexity"))
        figures = ", ".join(f"{loss.replace('_', ' ')} {figure}" for loss, figure in losses)
        lines.append(f"  epoch {epoch['epoch']}, step {epoch['step']:,}: {figures}")
    return "\n".join([*lines, f"test loss {format_number(result['test_loss'], '.4f')} nats per token", where])


def draw_run(text: str, points: Sequence[tuple[int, float]]) -> str:
    """A run's words as HTML, all of them escaped, with the training loss as a line; points: step and loss."""
    words = f"<pre>{escape(text)}</pre>"
    if len(points) < 2:
        return words
    last, low, high = points[-1][0], min(loss for _, loss in points), max(loss for _, loss in points)
    scale = 150 / ((high - low) or 1.0)
    line = " ".join(f"{480 * step / last:.1f},{scale * (high - loss):.1f}" for step, loss in points)
    title = f"training loss over {last:,} steps, from {points[0][1]:.4f} to {points[-1][1]:.4f}"
    curve = f'<polyline points="{line}" fill="none" stroke="#0072b2"/>'
    return f'{words}<svg width="480" height="150"><title>{title}</title>{curve}</svg>'
