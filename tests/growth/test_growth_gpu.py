"""Branches on a GPU: what they say there is what they say on a CPU, and they are grown there too."""

from pathlib import Path
from typing import Any

import pytest
import torch

import some_moe
from some_moe.model.attention import Cache
from tests.shared.tiny import A1, TINY

pytestmark = pytest.mark.gpu
TOKENS = torch.randint(3, 400, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two branches of one base, of which one looks back; grown on the GPU, in float32."""
    path = tmp_path_factory.mktemp("growth")
    some_moe.train(A1.config.override(TINY | {"model.score": "cosine"}), out=path / "base", display=False)
    few: dict[str, Any] = {"experts": 3, "steps": 4, "display": False}
    few["changes"] = {"data.batch_size": 4, "train.device": "cuda", "train.precision": "fp32"}
    for name, looks_back in (("plus", 0.7), ("minus", 0.0)):
        (path / f"{name}.txt").write_text("\n\n".join(f"{n} {name} {n} is to be found; what is it?" for n in range(60)))
        some_moe.grow(path / "base", path / f"{name}.txt", path / name, looks_back=looks_back, head_rank=4, **few)
    some_moe.merge([path / "plus", path / "minus"], path / "both")
    return path / "both"


@pytest.mark.parametrize("favour", [-4.0, 0.0, 4.0])
def test_a_gpu_finds_the_logits_of_a_cpu(merged: Path, favour: float) -> None:
    on_cpu, on_gpu = (some_moe.load(merged, favour=favour, device=device).model for device in ("cpu", "cuda"))
    with torch.no_grad():
        wanted, found = on_cpu(TOKENS), on_gpu(TOKENS.cuda())
    assert torch.allclose(found.logits.cpu(), wanted.logits, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(found.routings, wanted.routings, strict=True):
        assert (ours.experts.cpu() == theirs.experts).double().mean() > 0.98  # but where two scores are nearly the same


def test_a_cache_changes_nothing_on_a_gpu(merged: Path) -> None:
    model, cache, tokens = some_moe.load(merged, device="cuda").model, Cache(24), TOKENS.cuda()
    with torch.no_grad():
        pieces = [model(piece, cache=cache).logits for piece in tokens.split([9, 1, 1, 13], dim=1)]
        assert torch.allclose(torch.cat(pieces, 1), model(tokens).logits, rtol=1e-3, atol=1e-3)


def test_a_grown_run_is_evaluated_on_a_gpu_as_on_a_cpu(merged: Path) -> None:
    run = some_moe.load(merged)
    losses = [run.evaluate(device=device)["loss"] for device in ("cpu", "cuda")]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)  # in bfloat16 there
