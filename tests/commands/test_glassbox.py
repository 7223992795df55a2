"""`some analyze` as a person types it: on a finished run, a killed one, and ones that lack things."""

import json
import os
import shutil
from pathlib import Path

import pytest

from some_moe.cli import main
from some_moe.glass.figures.canvas import Drawing
from some_moe.glass.inspect.collection import Collection

FIGURES = {
    *("loss", "usage_ranked", "usage_by_depth", "co_selection", "usage_over_steps"),
    *("key_paths", "key_drift", "keys_pca", "keys_tsne", "keys_umap"),
}


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)


def train(path: Path, *settings: str) -> Path:
    """A run of three steps with four experts: too few for UMAP, whose compiler would take longer than the rest."""
    small = ["--data.train-subset-size", "24", "--data.val-subset-size", "4", "--train.epochs", "1"]
    few = ["--train.sample-tokens", "4", "--train.snapshot-every", "1", "--model.num-experts", "4"]
    assert main(["train", "--preset", "smoke", *small, *few, *settings, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["SOME_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    return train(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, to write into and to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not rendered: their files are empty, and a test is done in a second."""

    def save(drawing: Drawing, folder: Path) -> list[Path]:
        folder.mkdir(exist_ok=True)
        paths = [folder / f"{drawing.name}.{ending}" for ending in ("png", "svg")]
        for path in paths:
            path.touch()
        return paths

    monkeypatch.setattr(Drawing, "save", save)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


def read_analysis(run: Path) -> dict[str, object]:
    record: dict[str, object] = json.loads((run / "analysis" / "analysis.json").read_text())
    return record


def drawn(run: Path, ending: str = "png") -> set[str]:
    return {path.stem for path in (run / "analysis" / "figures").glob(f"*.{ending}")}


def test_analyze_writes_everything_and_prints_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["analyze", str(run), "--no-guilds", "--max-tokens", "300"]) == 0
    printed = capsys.readouterr().out
    assert "generalists" in printed
    assert str(run / "analysis" / "movement.html") in printed
    assert drawn(run) == drawn(run, "svg") == FIGURES
    record = read_analysis(run)
    assert record["missing"] == []
    assert {figure["name"] for figure in record["figures"]} == FIGURES  # type: ignore[attr-defined]
    for figure in record["figures"]:  # type: ignore[attr-defined]
        assert (run / "analysis" / figure["svg"]).is_file()
    layers = record["layers"]
    seen = Collection.load(run / "analysis" / "collected.safetensors")
    assert [layer["layer"] for layer in layers] == seen.meta["depths"]  # type: ignore[attr-defined]
    assert sum(layers[0]["counts"]) == seen.meta["num_tokens"] * seen.meta["top_k"]  # type: ignore[index]
    assert seen.meta["num_tokens"] <= 300


@pytest.mark.usefixtures("quick_figures")
def test_collecting_and_drawing_are_two_halves(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["analyze", str(run), "--collect-only", "--split", "test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["split"] == "test"
    assert not (run / "analysis" / "figures").exists()
    shutil.rmtree(run / "checkpoints")  # drawing needs no model
    assert main(["analyze", str(run), "--draw-only", "--no-guilds", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["collected"]["split"] == "test"
    assert drawn(run) == FIGURES


@pytest.mark.usefixtures("quick_figures")
def test_analyzing_again_gives_the_same_bytes_and_removes_what_is_no_longer_drawn(run: Path) -> None:
    assert main(["analyze", str(run), "--no-guilds"]) == 0
    first = {path.name: path.read_bytes() for path in (run / "analysis").rglob("*") if path.is_file()}
    (run / "analysis" / "figures" / "old.png").write_bytes(b"")
    assert main(["analyze", str(run), "--no-guilds"]) == 0
    second = {path.name: path.read_bytes() for path in (run / "analysis").rglob("*") if path.is_file()}
    assert first == second


@pytest.mark.usefixtures("quick_figures")
def test_a_run_that_is_still_training_is_analyzed_with_what_it_has(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "result.json").unlink()
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "tr')
    capsys.readouterr()
    assert main(["analyze", str(run), "--no-guilds"]) == 0
    printed = capsys.readouterr().out
    assert "training or killed" in printed
    assert "The last line of metrics.jsonl is unfinished" in printed
    assert drawn(run) == FIGURES


@pytest.mark.usefixtures("quick_figures")
def test_a_killed_run_without_checkpoint_still_has_curves_and_paths(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "result.json").unlink()
    capsys.readouterr()
    assert main(["analyze", str(run)]) == 0
    assert "No checkpoint: the model cannot be replayed" in capsys.readouterr().out
    assert drawn(run) == {"loss", "usage_over_steps", "key_paths", "key_drift"}
    assert not (run / "analysis" / "collected.safetensors").exists()
    assert read_analysis(run)["layers"] == []


@pytest.mark.usefixtures("quick_figures")
def test_a_run_without_snapshots_has_no_movement(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "keys")
    (run / "analysis").mkdir()
    (run / "analysis" / "movement.html").write_text("from an earlier analysis")
    capsys.readouterr()
    assert main(["analyze", str(run), "--no-guilds"]) == 0
    assert "there is no key movement" in capsys.readouterr().out
    assert drawn(run) == FIGURES - {"key_paths", "key_drift"}
    assert not (run / "analysis" / "movement.html").exists()


@pytest.mark.usefixtures("quick_figures")
@pytest.mark.parametrize(
    ("settings", "sentence", "figures"),
    [
        (("--model.ffn", "dense", "--model.dense-width", "32"), "dense blocks", {"loss"}),
        (
            ("--model.router", "hash"),
            "hash routing",
            FIGURES - {"key_paths", "key_drift", "keys_pca", "keys_tsne", "keys_umap"},
        ),
    ],
)
def test_models_without_keys_are_analyzed_as_far_as_they_go(
    settings: tuple[str, ...], sentence: str, figures: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = [f"--gravity.{name}=false" for name in ("use-alpha", "use-beta", "use-delta")]
    run = train(tmp_path / "run", *settings, *still, "--gravity.balance-rate", "0")
    capsys.readouterr()
    assert main(["analyze", str(run), "--no-guilds"]) == 0
    assert f"This model has no keys ({sentence})" in capsys.readouterr().out
    assert drawn(run) == figures


@pytest.mark.usefixtures("quick_figures")
def test_guilds_are_judged_last_on_the_same_collection(
    run: Path, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def analyze_guilds(path: Path, collection: Collection, *, control: Path | None) -> dict[str, object]:
        asked.update(path=path, tokens=len(collection.tokens), control=control)
        assert (path / "analysis" / "analysis.json").is_file()
        guilds = [{"name": "nouns, layer 1", "verdict": "supported"}, {"name": "verbs", "verdict": "not supported"}]
        return {"guilds": guilds, "level": 0.01}

    monkeypatch.setattr("some_moe.glass.inspect.guilds.analyze_guilds", analyze_guilds)
    capsys.readouterr()
    assert main(["analyze", str(run), "--max-tokens", "300", "--control", str(trained)]) == 0
    assert "1 of 2 candidates supported at level 0.01: nouns, layer 1" in capsys.readouterr().out
    seen = Collection.load(run / "analysis" / "collected.safetensors")
    assert asked == {"path": run, "tokens": len(seen.tokens), "control": trained}


def test_bad_input_is_one_sentence_and_leaves_no_trace(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    place = str(run)
    assert "exclude each other" in refused(capsys, "analyze", place, "--collect-only", "--draw-only")
    assert "--max-tokens 0 is out of range; use 1 or more" in refused(capsys, "analyze", place, "--max-tokens", "0")
    assert "is not a run" in refused(capsys, "analyze", "nowhere")
    assert "has no checkpoint 'step-9'" in refused(capsys, "analyze", place, "--checkpoint", "step-9")
    assert "collected.safetensors' is not there" in refused(capsys, "analyze", place, "--draw-only")
    assert "'other' is not a run" in refused(capsys, "analyze", place, "--control", "other")
    assert "--splitt is not an option" in refused(capsys, "analyze", place, "--splitt", "test")
    assert sorted(run.rglob("*")) == before
    (run / "analysis").write_text("in the way")
    assert "cannot be written" in refused(capsys, "analyze", place)


def test_missing_libraries_are_named_with_the_cure(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("some_moe.glass.api.DRAWING_LIBRARIES", ("numpy", "no_such_library"))
    monkeypatch.setattr("some_moe.glass.api.PACKAGES", {"no_such_library": "its-package"})
    said = refused(capsys, "analyze", str(run))
    assert "drawing needs no_such_library" in said
    assert "pip install its-package" in said
