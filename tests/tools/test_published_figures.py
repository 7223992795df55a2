"""The figures of docs/results.md: what they draw, and that every name can be read."""

from collections.abc import Callable
from pathlib import Path

from some_moe.lab.published import WITHIN, Comparison, Spread, compare_results, read_results
from some_moe.lab.registry import find_experiment
from tools.published_figures import Mark, draw_losses, find_crowd

MakeUp = Callable[..., Path]


def compare(path: Path, name: str) -> list[Comparison]:
    return compare_results(read_results(path.parent)[0], [name])


def mark(name: str, published: float) -> Mark:
    return Mark(name=name, published=published, measured=Spread((published,)), verdict=WITHIN)


def test_a_crowd_gets_a_panel_of_its_own() -> None:
    crowd = [mark("a", 0.70), mark("b", 0.72), mark("c", 0.75)]
    assert find_crowd([*crowd, mark("far", 2.0)]) == crowd
    assert find_crowd([*crowd, mark("near", 0.8)]) == []
    assert find_crowd(crowd) == []


def test_figures_draw_only_what_was_published_and_measured(make_up: MakeUp) -> None:
    assert draw_losses({"Baselines": compare(make_up("frozen-keys"), "frozen-keys")}) is None


def test_figures_name_their_axes_their_runs_and_the_tolerance(make_up: MakeUp) -> None:
    make_up("A6", loss=0.7)
    drawing = draw_losses({"A (v4)": compare(make_up("A1", loss=0.75), "A")})
    assert drawing is not None
    drawn = drawing.to_svg().decode()
    axes = ("published loss (nats per position, padding too)", "measured loss (nats")
    for label in (*axes, ">A1<", ">A6<", "tolerance"):
        assert label in drawn


def test_names_hide_neither_each_other_nor_a_point(make_up: MakeUp) -> None:
    for name in ("A1", "A2", "A3", "A4", "A5"):
        published = find_experiment(name).published
        assert published is not None
        path = make_up(name, loss=float(published.val_loss or 0) + 0.01)
    drawing = draw_losses({"A (v4)": compare(path, "A")})
    assert drawing is not None
    renderer = drawing.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    axes = drawing.figure.axes[0]
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert sorted(text.get_text() for text in axes.texts) == ["A1", "A2", "A3", "A4", "A5"]
    points = [axes.transData.transform(line.get_xydata()[0]) for line in axes.lines if len(line.get_xydata()) == 1]
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[place + 1 :])
        assert not any(box.contains(*point) for point in points)
