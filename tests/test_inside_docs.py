"""The Python of docs/inside.md runs as it is printed, on a small run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import some_moe
from some_moe.lab.registry.presets import find_preset

DOCUMENT = Path(__file__).parents[1] / "docs" / "inside.md"


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The page's code, and the run that it opens."""
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    small = {"data.train_subset_size": 24, "data.val_subset_size": 4, "train.epochs": 1, "train.sample_tokens": 0}
    some_moe.train(find_preset("smoke").override(small), out="runs/demo", display=False)
    found = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(found) == 3
    return found


def test_the_examples_run(blocks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for code in blocks[:2]:
        exec(code, names)
    assert capsys.readouterr().out
    assert names["found"]["mlp_out", 1].shape[:2] == names["tokens"].shape  # type: ignore[index,attr-defined]


def test_nnsight_sees_what_hooks_see(blocks: list[str]) -> None:
    pytest.importorskip("nnsight", reason="nnsight is not installed: pip install nnsight", exc_type=ImportError)
    check = """
wanted = hooks.run_with_hooks(run.model, tokens, [("blocks.0.hook_mlp_out", lambda value, hook: value * 0)])
assert torch.allclose(logits, wanted, atol=1e-5)
assert not torch.allclose(logits, run.model(tokens).logits, atol=1e-2)
assert experts.shape == (*tokens.shape, run.config.model.top_k)
"""
    Path("all.py").write_text(blocks[0] + blocks[2] + check, encoding="utf-8")  # it reads its caller's source
    done = subprocess.run([sys.executable, "all.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
