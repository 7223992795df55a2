"""The study of guilds: figures by hand, a page that says what records show, and a record without any text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from some_moe.cli import main as some
from some_moe.glass.inspect.guilds import Effort
from some_moe.glass.inspect.movement import LayerMovement
from tools.guilds_study.__main__ import main
from tools.guilds_study.figures import best_silhouette, correlate_drift, measure_clusters, measure_silhouette, spearman
from tools.guilds_study.page import Estimate, make_page
from tools.guilds_study.record import make_record

RANDOM = np.random.default_rng


def make_keys(num_groups: int, spread: float, seed: int = 0) -> np.ndarray:
    """32 unit keys of width 16 around some centres."""
    random = RANDOM(seed)
    centres = random.normal(size=(num_groups, 16))
    keys = centres[np.arange(32) % num_groups] + spread * random.normal(size=(32, 16))
    return np.asarray(keys / np.linalg.norm(keys, axis=1, keepdims=True))


def test_a_silhouette_by_hand() -> None:
    place = np.array([0.0, 1.0, 10.0, 11.0])
    distance = abs(place[:, None] - place)
    expected = np.mean([1 - 1 / 10.5, 1 - 1 / 9.5, 1 - 1 / 9.5, 1 - 1 / 10.5])
    assert measure_silhouette(distance, np.array([0, 0, 1, 1])) == pytest.approx(expected)
    assert measure_silhouette(distance, np.array([0, 1, 2, 3])) == 0


def test_clusters_are_found_where_they_are_and_nowhere_else() -> None:
    assert best_silhouette(make_keys(4, 0.05), RANDOM(1))[1] == 4
    planted, cloud, stretched = make_keys(4, 0.3), make_keys(32, 1.0), make_keys(32, 1.0) * np.linspace(0.1, 2, 16)
    found = measure_clusters(np.stack([planted, cloud, stretched]), RANDOM(2))
    assert found[0]["p_cloud"] <= 0.02
    assert found[0]["p_random"] <= 0.02
    # A long cloud is no galaxy, though it clusters better than random keys.
    assert found[1]["p_cloud"] > 0.05
    assert found[2]["p_cloud"] > 0.05


def test_spearman_by_hand() -> None:
    assert spearman(np.array([1, 2, 3, 9]), np.array([2, 4, 8, 9])) == pytest.approx(1)
    assert spearman(np.array([1, 2, 3]), np.array([3, 2, 1])) == pytest.approx(-1)
    assert spearman(np.array([1, 1, 2]), np.array([5, 5, 7])) == pytest.approx(1)
    assert spearman(np.array([1, 1, 1]), np.array([5, 6, 7])) == 0


def move(drift: np.ndarray) -> LayerMovement:
    distance = np.stack([np.zeros_like(drift), drift])
    empty = np.zeros((2, len(drift), 2))
    return LayerMovement(
        layer=0, steps=np.array([0, 10]), paths=empty, variance=np.zeros(2), usage=distance, distance=distance,
        speed=np.diff(distance, axis=0) / 10,
    )  # fmt: skip


def test_drift_is_compared_with_load_among_used_experts() -> None:
    load = np.array([[0, 1, 2, 3, 4, 5]])
    found = correlate_drift(load, [move(np.array([9.0, 5, 4, 3, 2, 1]))], RANDOM(0))
    assert found is not None
    assert found["rho"] == pytest.approx(-1)
    assert found["interval"][1] < 0
    assert correlate_drift(load, [move(np.zeros(6))], RANDOM(0)) is None
    assert correlate_drift(load, [], RANDOM(0)) is None


def test_an_estimate_has_the_interval_of_students_t() -> None:
    found = Estimate([1.0, 2.0, 3.0])
    assert found.half == pytest.approx(4.303 / np.sqrt(3))
    assert not found.is_above
    assert Estimate([1.0]).half is None
    assert Estimate([1.0]).show() == "+1.000"
    assert Estimate([]).show() == "–"
    assert Estimate([1.0, 1.0], within=0.5).half == pytest.approx(0.5)


def make_result(keys: str, seed: int, contrast: float, *, noun: bool) -> dict[str, Any]:
    names = {"Lexicon": "identity", "Mind's Eye": "part of speech", "Storyteller": "place in story"}
    share = {"share": 0.25, "least_used": 0.01, "least_central": 0.02, "most_used": 0.5, "random": [0.1, 0.2]}
    return {
        "format": 1, "run": f"A1-{keys}-seed{seed}", "experiment": "A1", "keys": keys, "seed": seed,
        "result": {"test_loss": 2.5 + seed / 100}, "text": {"name": "valid", "num_tokens": 100}, "num_layers": 8,
        "num_experts": 64, "labels": "By the tagger.",
        "passed": {"enrichment": 9, "association": 5, "random_keys": 3, "knockout": int(noun)},
        "guilds": [{"class": "noun", "layer": 4, "verdict": "supported" if noun else "not supported"}],
        "families": {family: {"p_adjusted": [0.001] * 8} for family in names.values()},
        "depth": {"slopes": [
            {"name": name, "contrast": contrast + seed / 1000, "contrast_interval": [contrast - 0.01, contrast + 0.01]}
            for name in names
        ]},
        "clusters": [{"silhouette": 0.2, "one_cloud": 0.1, "random_keys": 0.05, "p_cloud": 0.01}] * 8,
        "drift": {"rho": 0.4, "late_rho": 0.3} if keys == "gravity" else None,
        "pruning": [share],
    }  # fmt: skip


def test_the_page_says_what_the_records_show(tmp_path: Path) -> None:
    assert "Not measured yet" in make_page(tmp_path / "nowhere")
    for keys, contrast in (("gravity", 0.2), ("still", 0.1)):
        for seed in range(3):
            record = make_result(keys, seed, contrast, noun=keys == "gravity" and seed < 2)
            (tmp_path / f"{record['run']}.json").write_text(json.dumps(record), encoding="utf-8")
    text = make_page(tmp_path)
    assert "supported in 2 of 3 runs by gravity and 0 of 3 with still keys" in text
    assert "the published order of depth holds" in text
    assert "| Lexicon: identity falls | +0.201 ± " in text
    assert "| +0.100 ± 0.000 | yes |" in text  # the difference, paired by seed
    assert "| 25.0% of the experts, random | +0.1500" in text
    assert "| load against drift, Spearman | +0.400 ± 0.000 | – | – |" in text


def test_a_claim_of_one_seed_stays_open(tmp_path: Path) -> None:
    record = make_result("gravity", 0, 0.2, noun=True)
    (tmp_path / "one.json").write_text(json.dumps(record), encoding="utf-8")
    assert "the published order of depth is open" in make_page(tmp_path)


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.json").write_text("{", encoding="utf-8")
    for words in (
        ["fly"],
        ["record", str(tmp_path / "no-run")],
        ["record", str(tmp_path), "--max-tokens", "0"],
        ["page", "--results", str(tmp_path)],
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_trained_run_becomes_a_record_without_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    train = ["train", "--preset", "smoke", "--out", str(run), "--train.snapshot-every", "2", "--train.epochs", "1"]
    assert some([*train, "--data.train-subset-size", "32", "--data.val-subset-size", "6"]) == 0
    little = Effort(num_shuffles=19, num_key_draws=19, num_described_draws=2, num_community_shuffles=2)
    record = json.loads(json.dumps(make_record(run, max_tokens=800, effort=little), allow_nan=False))
    assert record["keys"] == "gravity"
    assert len(record["clusters"]) == record["num_layers"]
    assert record["drift"]["rho"] <= 1
    assert [one["share"] for one in record["pruning"]] == [0.125, 0.25, 0.5]
    assert not {"words", "contexts"} & {name for guild in record["guilds"] for name in guild}
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert "Pruning" in make_page(tmp_path / "records")
