"""The figures of docs/audit.md: drawn from what was measured, the same every time, and only those that it shows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from some_moe.config import ConfigError
from some_moe.glass.figures.canvas import ORANGE
from some_moe.lab.published import read_results
from tools.audit import FIGURES, draw_shown
from tools.audit_evidence import Evidence, Length, read_lengths
from tools.documents import main, make_documents
from tools.end_labels import spread_apart
from tools.published_figures import PublishedFigure

MakeUp = Callable[..., Path]


def score(seq_len: int, *seeds: float, run: str = "A1") -> Length:
    """A made-up record: a padded loss for each seed, all else fixed."""
    rest = {"loss": 2.8, "constant_loss_padded": 2.2}
    return Length(run, "valid", seq_len, [{"loss_padded": loss, **rest} for loss in seeds])


LENGTHS = (score(256, 2.0, 2.1), score(768, 0.7, 0.8))


@pytest.fixture
def evidence(make_up: MakeUp) -> Evidence:
    """Something for every figure."""
    make_up("V2")
    make_up("V8", loss=1.15)
    for seed, loss in enumerate((0.74, 0.76)):
        make_up("A1", seed, loss=loss)
        make_up("A6", seed, loss=loss)
    make_up("A6-bare", loss=2.1)
    make_up("A6-post-norm", loss=0.72)
    folder = make_up("A6-steady", loss=0.73).parent
    return Evidence(results=read_results(folder)[0], lengths=LENGTHS)


def draw(name: str, evidence: Evidence) -> tuple[PublishedFigure, list[Axes]]:
    drawing = FIGURES[name](evidence)
    assert drawing is not None
    return drawing, list(drawing.figure.axes)


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def points(axes: Axes, label: str) -> dict[str, list[float]]:
    """The x of the marks of one kind, by the name of their row."""
    names = {tick: text.get_text() for tick, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    (line,) = [line for line in axes.lines if line.get_label() == label]
    found: dict[str, list[float]] = {}
    for x, y in line.get_xydata():  # type: ignore[union-attr]
        found.setdefault(names[y], []).append(float(x))
    return found


# --- each figure ----------------------------------------------------------------------------------------------


def test_lengths_draw_one_panel_a_model_and_name_each_line_at_its_end() -> None:
    more = [*LENGTHS, score(512, 1.1, run="V2"), score(256, 2.0, run="V2")]
    _, panels = draw("audit-lengths", Evidence(lengths=more))
    assert [axes.get_title(loc="left") for axes in panels] == [
        "A1, trained in rows of 768 (valid)",
        "V2, trained in rows of 256 (valid)",
    ]
    assert sorted(words(panels[0])) == ["constant predictor, padded", "honest loss", "padded loss"]
    padded = panels[0].lines[1].get_xydata().tolist()  # type: ignore[union-attr]
    assert padded == [[256, 2.05], [768, 0.75]], "means over seeds"
    assert len(panels[0].collections) == 3, "a band for each line of several seeds"
    assert len(panels[1].collections) == 0
    assert panels[1].lines[1].get_xydata().tolist() == [[256, 2.0], [512, 1.1]]  # type: ignore[union-attr]


def test_a_model_in_rows_of_one_length_is_no_line() -> None:
    assert FIGURES["audit-lengths"](Evidence(lengths=LENGTHS[:1])) is None


def test_collapse_warns_of_runs_that_end_high_and_looks_closer_at_the_others(evidence: Evidence) -> None:
    _, (upper, lower) = draw("audit-collapse", evidence)
    assert sorted(words(upper)) == [
        "A6, measured",
        "A6, published",
        "A6-bare",
        "constant predictor",
        "others: see below",
    ]
    assert sorted(words(lower)) == ["A6, measured", "A6-post-norm", "A6-steady"]
    warned = [line for line in upper.lines if line.get_color() == ORANGE]
    assert [list(line.get_ydata())[-1] for line in warned] == [2.1]  # type: ignore[arg-type]
    published = upper.lines[0].get_xydata().tolist()  # type: ignore[union-attr]
    assert published == [[1, 1.4363], [2, 1.973], [3, 1.9679], [4, 1.9682]]


def test_collapse_without_other_runs_or_a_constant_predictor_shows_a6_alone(evidence: Evidence) -> None:
    alone = Evidence(results=[result for result in evidence.results if result.experiment.name == "A6"])
    _, panels = draw("audit-collapse", alone)
    assert [sorted(words(axes)) for axes in panels] == [["A6, measured", "A6, published"]]


def test_collapse_leaves_out_a_run_without_a_padded_loss(make_up: MakeUp) -> None:
    make_up("A6")
    folder = make_up("A6-text-loss").parent
    _, panels = draw("audit-collapse", Evidence(results=read_results(folder)[0]))
    assert sorted(words(panels[0])) == ["A6, measured", "A6, published"]


def test_collapse_draws_runs_of_which_only_the_end_is_known(make_up: MakeUp) -> None:
    folder = make_up("A6-bare", loss=0.8, published_epochs=None).parent
    _, (_, lower) = draw("audit-collapse", Evidence(results=read_results(folder)[0]))
    assert words(lower) == ["A6-bare"]


def test_gini_sets_both_counts_beside_the_printed_one_in_the_order_of_the_registry(evidence: Evidence) -> None:
    _, (axes,) = draw("audit-gini", evidence)
    assert points(axes, "real tokens") == {name: [0.5555] for name in ("V2", "V8", "A1", "A6")}
    assert points(axes, "padding counted") == {name: [0.7777] for name in ("V2", "V8", "A1", "A6")}
    assert points(axes, "published") == {"V2": [0.524], "V8": [0.693], "A1": [0.7912], "A6": [0.9038]}
    bottom, top = axes.get_ylim()
    assert bottom > top, "the first run stands highest"


def test_seeds_are_dots_and_a_far_published_loss_is_an_arrow(evidence: Evidence) -> None:
    _, (longer, shorter) = draw("audit-seeds", evidence)
    assert points(longer, "a seed, measured") == {"A1": [0.74, 0.76], "A6": [0.74, 0.76]}
    assert points(shorter, "a seed, measured") == {"V8": [1.15]}
    assert points(shorter, "published") == {"V8": [1.2117]}
    assert words(longer) == ["published 1.9682"], "A6's, far beyond the panel"
    assert longer.get_xlim()[1] < 1
    widths = [right - left for left, right in (longer.get_xlim(), shorter.get_xlim())]
    assert widths[0] == pytest.approx(widths[1]), "one scale for both"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_the_same_bytes_every_time_and_no_two_names_overlap(name: str, evidence: Evidence) -> None:
    drawing, panels = draw(name, evidence)
    made = drawing.to_svg()
    assert made == draw(name, evidence)[0].to_svg()
    assert b"<dc:date>" not in made
    assert drawing.caption.endswith(".")
    for axes in panels:
        boxes = [text.get_window_extent() for text in axes.texts]
        for index, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:index])
            assert axes.bbox.x1 >= box.x1, "a name is cut off"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_nothing_is_none(name: str) -> None:
    assert FIGURES[name](Evidence()) is None


@pytest.mark.parametrize("name", FIGURES)
def test_the_digest_follows_the_numbers(name: str, evidence: Evidence, make_up: MakeUp) -> None:
    before = draw(name, evidence)[0].digest
    folder = make_up("A6", 2, loss=0.75, layers=None).parent
    make_up("A1", 0, loss=0.7401, layers=[{"layer": 4, "gini": 0.8, "gini_real": 0.6}])
    lengths = (*LENGTHS[:1], score(768, 0.7, 0.81))
    assert draw(name, Evidence(results=read_results(folder)[0], lengths=lengths))[0].digest != before


# --- names at the ends of lines -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([], []),
        ([1.0, 5.0], [1.0, 5.0]),
        ([5.0, 5.0], [4.5, 5.5]),
        ([0.0, 0.0, 9.0], [0.0, 1.0, 9.0]),
        ([9.5, 10.0], [9.0, 10.0]),
        ([3.0, 3.2, 3.4], [2.2, 3.2, 4.2]),
    ],
)
def test_names_keep_their_order_and_a_gap_within_the_panel(wanted: list[float], places: list[float]) -> None:
    assert spread_apart(wanted, gap=1.0, low=0.0, high=10.0) == pytest.approx(places)


# --- the document ---------------------------------------------------------------------------------------------

TEXT = (
    "# Audit\n\n![Gini of every run,\nas dots](figures/audit-gini.svg)\n\nSee [the seeds](figures/audit-seeds.svg).\n"
)


@pytest.fixture
def audit(evidence: Evidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An audit beside made-up results."""
    assert evidence.results
    path = tmp_path / "docs" / "audit.md"
    path.parent.mkdir()
    path.write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return path


def audit_figures(files: dict[Path, Any]) -> list[str]:
    return [str(path) for path in files if path.name.startswith("audit-")]


def test_exactly_the_figures_that_the_audit_shows_are_made(audit: Path) -> None:
    out = Path("docs/results.md")
    assert audit_figures(make_documents(Path("results"), out)) == ["docs/figures/audit-gini.svg"]
    audit.write_text(TEXT + "![](figures/audit-seeds.svg) ![again](figures/audit-gini.svg)\n", encoding="utf-8")
    assert audit_figures(make_documents(Path("results"), out)) == [
        "docs/figures/audit-gini.svg",
        "docs/figures/audit-seeds.svg",
    ]
    audit.write_text("# Audit\n", encoding="utf-8")
    assert audit_figures(make_documents(Path("results"), out)) == []
    audit.unlink()
    assert audit_figures(make_documents(Path("results"), out)) == []


def test_a_shown_figure_appears_once_it_can_be_drawn(tmp_path: Path) -> None:
    text = "![Lengths](figures/audit-lengths.svg)"
    assert draw_shown(text, Evidence()) == {}
    rows = [{"seq_len": length.seq_len, **length.records[0]} for length in LENGTHS]
    record = {"experiment": "A1", "split": "valid", "seed": 0, "lengths": rows}
    (tmp_path / "lengths-A1.json").write_text(json.dumps(record))
    assert list(draw_shown(text, Evidence(lengths=read_lengths(tmp_path)))) == ["audit-lengths"]


def test_the_command_writes_the_figures_and_the_check_watches_them(
    audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 0
    assert main(["--check"]) == 0
    figure = audit.parent / "figures" / "audit-gini.svg"
    figure.write_bytes(figure.read_bytes().replace(b"V2", b"V3"))
    capsys.readouterr()
    assert main(["--check"]) == 1
    assert capsys.readouterr().err == (
        "documents: docs/figures/audit-gini.svg does not show the results; run `python -m tools.documents`\n"
    )


def test_an_unknown_figure_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        draw_shown("![x](figures/audit-ginis.svg)", Evidence(), file="a.md")
    assert str(caught.value) == "a.md shows the figure 'audit-ginis', which is not known; did you mean 'audit-gini'?"
