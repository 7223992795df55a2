"""Compiled blocks, which break into several graphs on a CPU, give the loss and every gradient of plain ones."""

import shutil

import pytest
import torch

from some_moe import SomeLM
from tests.shared.variants import BASE

CASES = {
    "as it is": {},
    "dropout, post-norm, cosine": {"dropout": 0.2, "norm": "post", "score": "cosine"},
    "grounded, one expert": {"grounding": 0.1, "top_k": 1},
    "trained experts": {"trainability": "full", "balance_loss": 0.01},
}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch needs g++ to compile for a CPU")


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
@pytest.mark.parametrize(
    "changes", [pytest.param(c, marks=pytest.mark.slow) if c else c for c in CASES.values()], ids=CASES
)
def test_compiled_blocks_have_the_gradients_of_plain_ones(changes: dict[str, object], backend: str) -> None:
    torch._dynamo.reset()
    config = BASE.override(changes)
    source = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, config.vocab_size, (2, 3, 12), generator=source)
    found, counts = [], []
    for compiled in (False, True):
        model = SomeLM(config)
        if compiled:
            for block in model.blocks:
                block.compile(backend=backend, dynamic=False)
        output = model.loss(tokens, targets, denominator=torch.ones(()))
        counts.append([routing.counts for routing in output.routings])
        loss = output.loss + (0 if output.aux_loss is None else output.aux_loss)
        names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
        found.append((loss, dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))))
    (plain_loss, plain), (loss, gradients) = found
    assert torch.allclose(loss, plain_loss)
    assert all(torch.equal(left, right) for left, right in zip(*counts, strict=True))
    for name, expected in plain.items():
        assert expected.norm() > 0, name
        assert torch.allclose(gradients[name], expected, rtol=1e-4, atol=1e-5), name
