"""What no rebuilding may change, beside what is kept: runs to the bit, and every registered experiment."""

import json
from pathlib import Path

import pytest
import torch

from . import kinds, registry

HERE = Path(__file__).parent
CPU = json.loads((HERE / "cpu.json").read_text())
REGISTRY = json.loads((HERE / "registry.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", kinds.KINDS)
def test_twelve_steps_leave_what_they_left(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    assert torch.get_num_threads() == 1
    found, kept = kinds.run_kind(name, tmp_path / "run"), CPU["kinds"][name]
    if kinds.describe_machine() == CPU["machine"]:
        assert found == kept
    for losses in ("losses", "gradient_norms"):
        assert [float.fromhex(loss) for loss in found[losses]] == pytest.approx(
            [float.fromhex(loss) for loss in kept[losses]], abs=kinds.LOOSE
        )
    assert float.fromhex(found["test_loss"]) == pytest.approx(float.fromhex(kept["test_loss"]), abs=kinds.LOOSE)


def test_every_default_is_what_it_was() -> None:
    found = registry.read_defaults()
    assert {name: found[name] for name in REGISTRY["defaults"]} == REGISTRY["defaults"]


def test_every_registered_experiment_is_what_it_was() -> None:
    found = registry.read_experiments(registry.read_defaults())
    assert list(found) == list(REGISTRY["experiments"])
    for name, record in REGISTRY["experiments"].items():
        assert json.loads(json.dumps(found[name])) == record, name
