"""One figure a study: every arm with its interval, beside what it is compared with."""

from collections.abc import Sequence

from some_moe.glass.figures.canvas import BLUE, GREY, ORANGE, SOFT, make_panels, styled
from tools.published_figures import PublishedFigure
from tools.studies.outcomes import Outcome

LONGEST = 26  # letters of a name


@styled
def draw_differences(title: str, base: Outcome, others: Sequence[Outcome]) -> PublishedFigure | None:
    """Each arm's loss minus the base's; None where nothing is measured."""
    rows = [(other.arm.name, gap) for other in others if other is not base and (gap := other.minus(base)) is not None]
    if not rows:
        return None
    rows.sort(key=lambda row: row[1].mean)
    figure, (axes,) = make_panels(1, title, height=0.9 + 0.26 * len(rows))
    for place, (_, gap) in enumerate(rows):
        color = GREY if not gap.is_apart else BLUE if gap.mean < 0 else ORANGE
        axes.errorbar(gap.mean, place, xerr=gap.half or 0.0, fmt="o", color=color, markersize=4, linewidth=1.4)
    axes.axvline(0.0, color=SOFT, linewidth=0.9)
    axes.set_yticks(range(len(rows)), [shorten(name) for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("difference (nats a token)")
    caption = (
        f"Loss on test minus that of: {base.arm.words}. To the left is better. Bars are 95 % over seeds and stories, "
        "paired; grey ones hold zero, a point without a bar is one seed."
    )
    content = [[name, gap.mean, gap.half] for name, gap in rows]
    return PublishedFigure(title=title, caption=caption, figure=figure, content=[base.arm.key, content])


@styled
def draw_losses(title: str, arms: Sequence[Outcome]) -> PublishedFigure | None:
    """Loss against trained parameters; None where nothing is measured."""
    points = [
        (number, size / 1e6, loss)
        for number, one in enumerate(arms, 1)
        if (loss := one.loss) is not None and (size := one.average("trainable_parameters")) is not None
    ]
    if not points:
        return None
    figure, (axes,) = make_panels(1, title, height=3.6)
    for number, size, loss in points:
        axes.errorbar(size, loss.mean, yerr=loss.half or 0.0, fmt="o", color=BLUE, markersize=4)
        axes.annotate(str(number), (size, loss.mean), textcoords="offset points", xytext=(5, 3), fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("trained parameters (millions)")
    axes.set_ylabel("test (nats a token)")
    caption = (
        "Low and to the left is better; bars are 95 % over seeds and stories. Numbers count the rows of the table."
    )
    content = [[number, size, loss.mean, loss.half] for number, size, loss in points]
    return PublishedFigure(title=title, caption=caption, figure=figure, content=content)


def shorten(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
