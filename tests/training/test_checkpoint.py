"""A checkpoint is loaded into the model that it was saved from, or refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest

from some_moe.config import ConfigError
from some_moe.sinks.display import Display
from some_moe.training.loop import start
from some_moe.training.run_folder import RunFolder
from tests.shared.tiny import A1, TINY

CONFIG = A1.config.override(TINY)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    trainer = start(CONFIG, RunFolder(tmp_path / "saved"), Display())
    trainer.save()
    trainer.folder.release()
    return tmp_path / "saved" / "checkpoints" / "step-0"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.num_layers": 1}, r"of \S+ it has shape \(.*\), the config none"),
        ({"model.num_layers": 3}, r"of \S+ it has none, the config shape \(.*\)"),
        ({"model.num_experts": 4}, r"of \S+keys it has shape \(8, 32\), the config shape \(4, 32\)"),
        ({"model.trainability": "full"}, r"of \S+ it has none, the config shape \(.*\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    place: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"step-0' does not fit this config: {words}; use the config that was saved"):
        start(CONFIG.override(changes), RunFolder(tmp_path / "run"), Display(), init_from=place)
    assert not (tmp_path / "run").exists()


def test_experts_of_another_seed_are_refused(place: Path, tmp_path: Path) -> None:
    config = CONFIG.override({"model.expert_seed": 1})
    with pytest.raises(ConfigError, match="the experts of layer 0 have seed 1, but the saved model was made with 0"):
        start(config, RunFolder(tmp_path / "run"), Display(), init_from=place)


def test_a_checkpoint_without_its_tokenizer_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "saved" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"the run '.*/saved' has no tokenizer.json; restore it, or give another run"):
        start(CONFIG, RunFolder(tmp_path / "run"), Display(), init_from=place)
