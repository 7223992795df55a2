"""What the router adds up on a GPU equals sums in float64: selections exactly, queries to the error of a length."""

import pytest
import torch

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize(
    ("n", "num_experts", "top_k", "d"),
    [
        (1000, 64, 4, 384),
        (77, 8, 8, 40),
        (1, 16, 1, 512),
        (5000, 63, 4, 512),
        (500, 512, 8, 96),  # too many experts for one pass
        (300, 300, 2, 64),
        (24_576, 64, 4, 384),
        (7001, 64, 4, 520),  # columns that do not fill a program's last part, several tiles of tokens in a row
        (300, 16, 2, 2000),
    ],
)
def test_sums_by_expert_equal_float64(n: int, num_experts: int, top_k: int, d: int) -> None:
    from some_moe.kernels.nearest import sum_by_expert

    torch.manual_seed(n)
    query = torch.randn(n, d, device=DEVICE).bfloat16()
    query[n // 2] = 0  # no direction
    experts = torch.rand(n, num_experts, device=DEVICE).topk(top_k).indices
    counted = torch.rand(n, device=DEVICE) < 0.7
    counts, pairs, query_sum, num_counted = sum_by_expert(experts, counted, query, num_experts)
    chosen = torch.zeros(n, num_experts, dtype=torch.float64, device=DEVICE)
    chosen.scatter_(1, experts, counted.double()[:, None].expand(-1, top_k))
    exact = query.double()
    exact_norms = exact.norm(dim=1)
    unit = exact / exact_norms.where(exact_norms > 0, 1)[:, None]
    assert torch.equal(pairs, (chosen.T @ chosen).long())
    assert torch.equal(counts, chosen.sum(0).long())
    assert int(num_counted) == int(counted.sum())
    assert torch.allclose(query_sum.double(), chosen.T @ unit, atol=1e-4)


@pytest.mark.parametrize(("num_experts", "d"), [(64, 512), (300, 64)])
def test_sums_by_expert_are_the_same_bits_every_time(num_experts: int, d: int) -> None:
    from some_moe.kernels.nearest import sum_by_expert

    torch.manual_seed(0)
    query = torch.randn(5000, d, device=DEVICE).bfloat16()
    experts = torch.rand(5000, num_experts, device=DEVICE).topk(4).indices
    counted = torch.rand(5000, device=DEVICE) < 0.7
    once, again = (sum_by_expert(experts, counted, query, num_experts) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("num_experts", [16, 300])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_squares_of_huge_and_tiny_queries_stay_in_range(size: float, num_experts: int) -> None:
    from some_moe.kernels.nearest import sum_by_expert

    query = torch.full((40, 64), size, device=DEVICE).bfloat16()
    experts = torch.zeros(40, 1, dtype=torch.int64, device=DEVICE)
    counted = torch.ones(40, dtype=torch.bool, device=DEVICE)
    _, _, query_sum, _ = sum_by_expert(experts, counted, query, num_experts)
    assert torch.allclose(query_sum[0], torch.full((64,), 5.0, device=DEVICE), rtol=1e-4)


def test_compiled_summaries_equal_launched_ones() -> None:
    from some_moe.config import GravityConfig
    from some_moe.model.routing import TokenInfo, summarize
    from some_moe.model.samples import make_layer_words

    torch.manual_seed(0)
    query = torch.randn(3, 500, 64, device=DEVICE).bfloat16()
    experts = torch.rand(3, 500, 16, device=DEVICE).topk(4).indices
    info = TokenInfo.of((3, 500), query.device, counted=torch.rand(3, 500, device=DEVICE) < 0.9)
    words = make_layer_words(1)[0].to(DEVICE)
    found = [
        run(experts, query, None, info, words, 16, GravityConfig())
        for run in (summarize, torch.compile(summarize, fullgraph=True, backend="aot_eager"))
    ]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
