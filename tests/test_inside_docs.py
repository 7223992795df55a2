"""The Python of docs/inside.md runs as it is printed, on a small run."""

import re
from pathlib import Path

import pytest

import some_moe
from some_moe.lab.registry.presets import find_preset

DOCUMENT = Path(__file__).parents[1] / "docs" / "inside.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    small = {"data.train_subset_size": 24, "data.val_subset_size": 4, "train.epochs": 1, "train.sample_tokens": 0}
    some_moe.train(find_preset("smoke").override(small), out="runs/demo", display=False)
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for code in blocks:
        if "nnsight" not in code:  # which need not be installed
            exec(code, names)
    assert capsys.readouterr().out
    assert names["found"]["mlp_out", 1].shape[:2] == names["tokens"].shape  # type: ignore[index,attr-defined]
