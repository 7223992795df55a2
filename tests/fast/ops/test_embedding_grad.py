"""The embedding's gradient on a GPU equals a sum in float64, whoever has the tokens; the same bits every time."""

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
KINDS = ["random", "constant", "two ids", "all different", "zipf", "padding"]


def draw_tokens(kind: str, n: int, num_ids: int) -> Tensor:
    anything = torch.randint(num_ids, (n,), device=DEVICE)
    match kind:
        case "constant":
            return torch.full_like(anything, num_ids - 1)
        case "two ids":
            return anything % 2 * (num_ids // 2)
        case "all different":
            return torch.randperm(max(n, num_ids), device=DEVICE)[:n] % num_ids  # as far as there are ids
        case "zipf":
            return (num_ids ** torch.rand(n, dtype=torch.float64, device=DEVICE)).long() - 1
        case "padding":
            return torch.where(torch.rand(n, device=DEVICE) < 0.7, num_ids // 3, anything)
    return anything


def assert_summed(grad: Tensor, tokens: Tensor, num_ids: int) -> None:
    """Each element to an error that is small beside the sum of what was added up, without signs."""
    from some_moe.fast.ops.embedding_grad import embedding_gradient

    found = embedding_gradient(grad, tokens, num_ids)
    rows, ids = grad.flatten(0, -2).double(), tokens.flatten()
    nothing = torch.zeros(num_ids, grad.shape[-1], dtype=torch.float64, device=grad.device)
    exact, size = nothing.index_add(0, ids, rows), nothing.index_add(0, ids, rows.abs())
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    assert bool(((found - exact).abs() <= 4e-6 * size).all())


@pytest.mark.parametrize("d", [48, 384, 100])
@pytest.mark.parametrize("num_ids", [7, 8192, 50257])
@pytest.mark.parametrize("n", [0, 1, 33, 3072, 24_576])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_float64(kind: str, n: int, num_ids: int, d: int) -> None:
    torch.manual_seed(n)
    assert_summed(torch.randn(n, d, device=DEVICE).bfloat16(), draw_tokens(kind, n, num_ids), num_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "num_ids", "d"), [(5000, 300, 384), (24_576, 8192, 40), (300, 20_000, 65)])
def test_gradients_in_other_types(n: int, num_ids: int, d: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    assert_summed(torch.randn(n, d, device=DEVICE).to(dtype), draw_tokens(kind, n, num_ids), num_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "num_ids", "d"), [(100_000, 8192, 64), (70_001, 100, 7), (257, 1, 512), (256, 32, 1)])
def test_longer_blocks_and_edges_of_chunks(n: int, num_ids: int, d: int, kind: str) -> None:
    torch.manual_seed(n)
    assert_summed(torch.randn(n, d, device=DEVICE).bfloat16(), draw_tokens(kind, n, num_ids), num_ids)


@pytest.mark.parametrize("size", [255, 256, 257, 511, 512, 513])
def test_many_tokens_of_one_id_beside_few_of_others(size: int) -> None:
    """Long runs that begin and end anywhere in a chunk, two of them in one."""
    torch.manual_seed(size)
    sizes = torch.tensor([size, 3, size, 40, 700, size, 1], device=DEVICE)
    tokens = torch.arange(7, device=DEVICE).repeat_interleave(sizes)
    tokens = tokens[torch.randperm(len(tokens), device=DEVICE)]
    assert_summed(torch.randn(len(tokens), 64, device=DEVICE).bfloat16(), tokens, 8192)  # each its own bucket


def test_an_id_that_occurs_once_has_its_row_as_it_is() -> None:
    from some_moe.fast.ops.embedding_grad import embedding_gradient

    torch.manual_seed(0)
    grad, tokens = torch.randn(3000, 384, device=DEVICE).bfloat16(), torch.randperm(8192, device=DEVICE)[:3000]
    found = embedding_gradient(grad, tokens, 8192)
    assert torch.equal(found, torch.zeros_like(found).index_copy(0, tokens, grad.float()))


def test_batches_of_rows_and_views_of_other_layouts() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(50, (70, 9), device=DEVICE).T
    assert_summed(torch.randn(9, 70, 96, device=DEVICE).bfloat16()[:, :, ::2], tokens, 50)
    assert_summed(torch.randn(96, device=DEVICE).bfloat16().expand(9, 70, 96), tokens, 50)
    # These are flat already, and have gaps.
    for gappy in (tokens[:, :1], tokens[0, ::2], tokens[0, :1].expand(33)):
        assert_summed(torch.randn(*gappy.shape, 48, device=DEVICE).bfloat16(), gappy, 50)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time_and_in_a_graph(kind: str) -> None:
    from some_moe.fast.ops.embedding_grad import embedding_gradient

    torch.manual_seed(0)
    grad = torch.randn(24_576, 384, device=DEVICE).bfloat16()
    other, tokens = draw_tokens("random", 24_576, 8192), draw_tokens(kind, 24_576, 8192)
    once, again = (embedding_gradient(grad, tokens, 8192) for _ in range(2))
    assert torch.equal(once, again)
    given, graph = other.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = embedding_gradient(grad, given, 8192)
    for now in (tokens, other, tokens):
        given.copy_(now)
        graph.replay()
        assert torch.equal(captured, embedding_gradient(grad, now, 8192))
