"""The animation is one page that needs nobody else, escapes what it is given, and holds the paths."""

import json
import re

import numpy as np
import pytest

from some_moe.glass.inspect.movement import LayerMovement
from some_moe.glass.page.render import describe_movement, render_movement


def make_movement(num_frames: int = 4, num_experts: int = 3) -> LayerMovement:
    paths = np.zeros((num_frames, num_experts, 2))
    paths[:, 1, 0] = np.linspace(0, 2, num_frames)
    paths[:, 2, 1] = 1
    return LayerMovement(
        layer=5,
        steps=np.arange(num_frames) * 10,
        paths=paths,
        variance=np.array([0.75, 0.25]),
        usage=np.ones((num_frames, num_experts), np.float32),
        distance=np.linalg.norm(paths - paths[0], axis=-1),
        speed=np.linalg.norm(np.diff(paths, axis=0), axis=-1) / 10,
    )


def read_data(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found[1])
    return data


def render(movement: LayerMovement, name: str = "mine") -> str:
    return render_movement(name, describe_movement([movement], {5: ["#440154"] * movement.paths.shape[1]}))


def test_the_page_holds_the_paths_to_a_thousandth_of_their_extent() -> None:
    data = read_data(render(make_movement()))
    assert data["steps"] == [0, 10, 20, 30]
    (layer,) = data["layers"]  # type: ignore[misc]
    assert layer["layer"] == 5
    assert (layer["width"], layer["height"]) == (1000, 500)
    assert layer["paths"][0] == [0, 0, 0, 0, 0, 500]
    assert layer["paths"][-1] == [0, 0, 1000, 0, 0, 500]
    assert layer["distance"][-1] == [0, 2, 0]
    assert not layer["still"]
    assert layer["xLabel"] == "axis 1 (75 % of variance)"


def test_the_page_asks_nobody_for_anything() -> None:
    page = render(make_movement())
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert re.findall(r"https?://[^\s\"']+", page) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_names_are_escaped() -> None:
    page = render(make_movement(), "<script>alert(1)</script> & more $x")
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more $x" in page


def test_a_still_layer_is_marked() -> None:
    movement = make_movement()
    movement.paths[:] = movement.paths[0]
    movement.distance[:] = 0
    (layer,) = read_data(render(movement))["layers"]  # type: ignore[misc]
    assert layer["still"]


def test_too_many_points_are_thinned_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("some_moe.glass.page.render.MOST_POINTS", 60)
    data = read_data(render(make_movement(num_frames=101)))
    steps = data["steps"]
    assert isinstance(steps, list)
    assert len(steps) == 20
    assert (steps[0], steps[-1]) == (0, 1000)


def test_the_same_movement_gives_the_same_page() -> None:
    assert render(make_movement()) == render(make_movement())
