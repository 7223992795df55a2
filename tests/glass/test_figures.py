"""Every figure has a title, labelled axes and data in it, and is the same file every time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from some_moe.config import RunConfig
from some_moe.glass.figures import choose_colours, draw_figures
from some_moe.glass.figures.canvas import Drawing, shorten
from some_moe.glass.figures.keys import draw_key_map, draw_key_paths, group_neighbours
from some_moe.glass.figures.usage import draw_co_selection, draw_ranked_usage
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.findings import Findings, look_inside
from some_moe.glass.inspect.movement import LayerMovement
from some_moe.glass.inspect.projections import KeyMap, map_keys
from some_moe.glass.inspect.runs import KeySnapshots, RunRecord

NUM_LAYERS, NUM_EXPERTS, NUM_TOKENS, TOP_K, WIDTH = 3, 9, 400, 2, 12


def make_collection(num_layers: int = NUM_LAYERS, num_experts: int = NUM_EXPERTS) -> Collection:
    random = np.random.default_rng(0)
    popularity = np.geomspace(1, 0.01, num_experts)
    popularity[-1] = 0  # the last one is never chosen
    scores = random.gumbel(size=(num_layers, NUM_TOKENS, num_experts)) + np.log(popularity + 1e-30)
    return Collection(
        meta={
            **{"run": "made", "step": 7, "split": "valid", "num_experts": num_experts, "top_k": TOP_K},
            **{"depths": list(range(num_layers)), "stories": 1, "num_tokens": NUM_TOKENS, "loss": 1.0, "notes": []},
        },
        tokens=random.integers(3, 40, NUM_TOKENS).astype(np.int32),
        targets=np.zeros(NUM_TOKENS, np.int32),
        story=np.zeros(NUM_TOKENS, np.int32),
        position=np.arange(NUM_TOKENS, dtype=np.int32),
        loss=np.ones(NUM_TOKENS, np.float32),
        experts=np.argsort(-scores, axis=-1)[..., :TOP_K].astype(np.int16),
        gates=np.full((num_layers, NUM_TOKENS, TOP_K), 0.5, np.float32),
        keys=random.standard_normal((num_layers, num_experts, WIDTH)).astype(np.float32),
        usage=np.ones((num_layers, num_experts), np.float32),
        respawns=np.zeros((num_layers, num_experts), np.int64),
        queries=random.standard_normal((num_layers, 30, WIDTH)).astype(np.float32),
    )


def make_run(num_layers: int = NUM_LAYERS, num_experts: int = NUM_EXPERTS) -> RunRecord:
    def usage(gini: float) -> list[dict[str, float]]:
        return [{"gini": gini, "entropy_bits": 2.0} for _ in range(num_layers)]

    return RunRecord(
        path=Path("runs/made"),
        config=RunConfig(name="made").override({"model.num_experts": num_experts, "model.top_k": TOP_K}),
        env={},
        steps=[{"step": n, "tokens": 100 * n, "train_loss": 6 / n, "gini_middle": 0.3} for n in range(1, 20)],
        evaluations=[
            {"step": n, "tokens": 100 * n, "val_loss": 7 / n, "layers": usage(0.1 * n / 10)} for n in (5, 10, 19)
        ],
        result=None,
        samples=[],
        snapshots=KeySnapshots(),
        checkpoints=(),
        status="training or killed",
        missing=(),
    )


def make_movement(layer: int, num_experts: int = NUM_EXPERTS) -> LayerMovement:
    random = np.random.default_rng(layer)
    paths = random.standard_normal((4, num_experts, 2)).cumsum(0)
    return LayerMovement(
        layer=layer,
        steps=np.array([0, 10, 20, 30]),
        paths=paths,
        variance=np.array([0.5, 0.2]),
        usage=random.uniform(0, 3, (4, num_experts)),
        distance=np.linalg.norm(paths - paths[0], axis=-1),
        speed=np.linalg.norm(np.diff(paths, axis=0), axis=-1) / 10,
    )


def make_findings(num_layers: int = NUM_LAYERS, num_experts: int = NUM_EXPERTS) -> Findings:
    collection = make_collection(num_layers, num_experts)
    seen = look_inside(make_run(num_layers, num_experts), collection)
    keys = list(collection.keys)
    # UMAP compiles for seconds; here its place is taken by other points, for only the drawing is tested.
    stand_in = [KeyMap(method="umap", points=keys[layer][:, 2:4].astype(float)) for layer in range(num_layers)]
    return Findings(
        run=seen.run,
        collection=collection,
        layers=seen.layers,
        movements=[make_movement(layer, num_experts) for layer in range(num_layers)],
        maps={"pca": map_keys(keys, "pca"), "tsne": map_keys(keys, "pca"), "umap": stand_in},
    )


def draw_map(findings: Findings, method: str) -> Drawing:
    return draw_key_map(findings.maps[method], findings.layers, choose_colours(findings))


def draw_everything(findings: Findings) -> Iterator[Drawing]:
    yield from draw_figures(findings)
    for method in findings.maps:
        yield draw_map(findings, method)


@pytest.fixture(scope="module")
def drawings() -> dict[str, Drawing]:
    return {drawing.name: drawing for drawing in draw_everything(make_findings())}


def test_everything_that_the_findings_allow_is_drawn(drawings: dict[str, Drawing]) -> None:
    assert list(drawings) == [
        *("loss", "usage_ranked", "usage_by_depth", "co_selection", "usage_over_steps"),
        *("key_paths", "key_drift", "keys_pca", "keys_umap"),
    ]


def test_every_figure_has_a_title_labels_and_data(drawings: dict[str, Drawing]) -> None:
    for drawing in drawings.values():
        assert drawing.figure.get_suptitle() == drawing.title
        assert drawing.caption.endswith(".")
        for axes in drawing.figure.axes:
            assert axes.has_data(), drawing.name
            if axes.get_label() != "<colorbar>":
                assert axes.get_title(loc="left"), drawing.name
        assert any(axes.get_xlabel() for axes in drawing.figure.axes), drawing.name
        assert any(axes.get_ylabel() for axes in drawing.figure.axes), drawing.name


def test_units_stand_on_the_axes(drawings: dict[str, Drawing]) -> None:
    labels = {
        name: {axes.get_xlabel() for axes in drawing.figure.axes} | {axes.get_ylabel() for axes in drawing.figure.axes}
        for name, drawing in drawings.items()
    }
    assert {"loss (nats per token)", "training step", "trained tokens"} <= labels["loss"]
    assert {"gini", "entropy (bits)", "entropy (nats)", "layer"} <= labels["usage_by_depth"]
    assert "load (fair shares)" in labels["usage_ranked"]
    assert "share of the expert's tokens" in labels["co_selection"]


def test_curves_show_the_numbers_of_the_run(drawings: dict[str, Drawing]) -> None:
    over_steps, over_tokens = drawings["loss"].figure.axes
    lines = {str(line.get_label()): line for line in over_steps.get_lines()}
    assert list(lines["valid"].get_xdata()) == [5, 10, 19]
    np.testing.assert_allclose(lines["valid"].get_ydata(), [7 / 5, 7 / 10, 7 / 19])
    assert list(over_tokens.get_lines()[1].get_xdata()) == [500, 1000, 1900]
    assert "0.3684" in drawings["loss"].caption


def test_an_expert_has_the_same_colour_on_every_map_and_path(drawings: dict[str, Drawing]) -> None:
    findings = make_findings()
    used = np.array(findings.layers[1].counts) > 0
    expected = np.array(choose_colours(findings)[1])
    for name in ("keys_pca", "keys_umap"):
        points = drawings[name].figure.axes[1].collections[0]
        shown = np.array([to_hex(colour) for colour in points.get_facecolor()])
        assert np.array_equal(shown[used], expected[used])
    ends = drawings["key_paths"].figure.axes[1].collections[-1]
    assert [to_hex(colour) for colour in ends.get_facecolor()] == list(expected)


def test_a_point_is_larger_the_more_an_expert_works(drawings: dict[str, Drawing]) -> None:
    findings = make_findings()
    sizes = drawings["keys_pca"].figure.axes[0].collections[0].get_sizes()
    order = np.argsort(findings.layers[0].loads)
    assert np.all(np.diff(np.asarray(sizes)[order]) >= 0)


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    written: list[list[bytes]] = []
    for place in ("first", "second"):
        findings = make_findings()
        assert findings.collection is not None
        chosen = (
            draw_ranked_usage(findings.layers),
            draw_co_selection(findings.collection),
            draw_key_paths(findings.movements, choose_colours(findings)),
        )
        written.append([path.read_bytes() for drawing in chosen for path in drawing.save(tmp_path / place)])
    assert written[0] == written[1]
    assert all(png.startswith(b"\x89PNG") for png in written[0][::2])
    assert all(b"<text" in svg and b"<dc:date>" not in svg for svg in written[0][1::2])  # text stays text


def test_pictures_are_wide_enough_for_print_and_their_text_large_enough_for_a_phone(
    drawings: dict[str, Drawing], tmp_path: Path
) -> None:
    drawing = drawings["usage_by_depth"]
    png, _ = drawing.save(tmp_path)
    with Image.open(png) as picture:
        assert picture.width == 1000
    phone = 360 / drawing.figure.get_figwidth()  # pixels an inch, at the width of a phone
    for axes in drawing.figure.axes:
        for text in (axes.title, axes.xaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
            assert text.get_fontsize() / 72 * phone >= 8.5


def test_many_layers_stand_in_two_columns_without_numbers() -> None:
    drawing = draw_map(make_findings(num_layers=6, num_experts=40), "pca")
    assert len(drawing.figure.axes) == 6
    assert drawing.figure.axes[1].get_subplotspec().colspan.start == 1  # type: ignore[union-attr]
    assert not drawing.figure.axes[0].texts


def test_without_a_collection_the_curves_and_paths_are_left() -> None:
    seen = make_findings()
    without = Findings(run=seen.run, collection=None, layers=[], movements=seen.movements)
    assert [one.name for one in draw_figures(without)] == ["loss", "usage_over_steps", "key_paths", "key_drift"]


def test_a_still_key_store_says_that_no_key_moved() -> None:
    moved = make_movement(0)
    still = LayerMovement(
        layer=0,
        steps=moved.steps,
        paths=np.repeat(moved.paths[:1], 4, axis=0),
        variance=moved.variance,
        usage=moved.usage,
        distance=np.zeros_like(moved.distance),
        speed=np.zeros_like(moved.speed),
    )
    findings = Findings(run=make_run(), collection=None, layers=[], movements=[still])
    captions = {one.name: one.caption for one in draw_figures(findings)}
    assert captions["key_paths"].endswith("No key moved.")


def test_the_note_of_a_map_is_in_its_caption() -> None:
    findings = make_findings(num_experts=4)
    assert findings.collection is not None
    findings.maps["tsne"] = map_keys(list(findings.collection.keys), "tsne")
    drawing = draw_map(findings, "tsne")
    assert drawing.caption.count("t-SNE needs at least 8 keys and this layer has 4: PCA is shown instead.") == 1
    assert drawing.figure.axes[0].get_xlabel() == "PCA 1"


def test_points_that_lie_together_share_a_label() -> None:
    points = np.array([[0, 0], [10, 10], [0.1, 0], [10, 0]], float)
    assert group_neighbours(points) == [[0, 2], [1], [3]]


def test_large_numbers_are_shortened() -> None:
    assert [shorten(value) for value in (0, 500, 2500, 1e6, 2.5e9)] == ["0", "500", "2.5k", "1M", "2.5G"]
