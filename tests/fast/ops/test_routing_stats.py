"""What the router adds up on a GPU equals sums in float64: selections exactly, queries to the error of a length."""

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NOT_SAMPLED = torch.iinfo(torch.int64).max


def units(query: Tensor) -> Tensor:
    exact = query.double()
    lengths = exact.norm(dim=1)
    return exact / lengths.where(lengths > 0, 1)[:, None]


def check_sums(
    experts: Tensor, counted: Tensor, query: Tensor, counts: Tensor, pairs: Tensor, query_sum: Tensor, number: Tensor
) -> None:
    chosen = torch.zeros(len(query), len(counts), dtype=torch.float64, device=DEVICE)
    chosen.scatter_(1, experts, counted.double()[:, None].expand(experts.shape))
    assert torch.equal(pairs, (chosen.T @ chosen).long())
    assert torch.equal(counts, chosen.sum(0).long())
    assert int(number) == int(counted.sum())
    assert torch.allclose(query_sum.double(), chosen.T @ units(query), atol=1e-4)


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
    from some_moe.fast.ops.routing_stats import sum_by_expert

    torch.manual_seed(n)
    query = torch.randn(n, d, device=DEVICE).bfloat16()
    query[n // 2] = 0  # no direction
    experts = torch.rand(n, num_experts, device=DEVICE).topk(top_k).indices
    counted = torch.rand(n, device=DEVICE) < 0.7
    counts, pairs, query_sum, num_counted = sum_by_expert(experts, counted, query, num_experts)
    check_sums(experts, counted, query, counts, pairs, query_sum, num_counted)


@pytest.mark.parametrize(("num_experts", "d"), [(64, 512), (300, 64)])
def test_sums_by_expert_are_the_same_bits_every_time(num_experts: int, d: int) -> None:
    from some_moe.fast.ops.routing_stats import sum_by_expert

    torch.manual_seed(0)
    query = torch.randn(5000, d, device=DEVICE).bfloat16()
    experts = torch.rand(5000, num_experts, device=DEVICE).topk(4).indices
    counted = torch.rand(5000, device=DEVICE) < 0.7
    once, again = (sum_by_expert(experts, counted, query, num_experts) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("num_experts", [16, 300])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_squares_of_huge_and_tiny_queries_stay_in_range(size: float, num_experts: int) -> None:
    from some_moe.fast.ops.routing_stats import sum_by_expert

    query = torch.full((40, 64), size, device=DEVICE).bfloat16()
    experts = torch.zeros(40, 1, dtype=torch.int64, device=DEVICE)
    counted = torch.ones(40, dtype=torch.bool, device=DEVICE)
    _, _, query_sum, _ = sum_by_expert(experts, counted, query, num_experts)
    assert torch.allclose(query_sum[0], torch.full((64,), 5.0, device=DEVICE), rtol=1e-4)


@pytest.mark.parametrize(
    ("layers", "n", "num_experts", "top_k", "d", "samples", "programs"),
    [
        (8, 24_576, 64, 4, 384, 32, 132),
        (10, 24_576, 64, 4, 512, 32, 132),
        (3, 1000, 63, 3, 40, 7, 132),  # experts and columns that do not fill their blocks
        (1, 77, 8, 8, 130, 1, 132),
        (12, 1, 16, 1, 512, 2, 132),
        (9, 300, 16, 2, 64, 3, 4),  # more layers than programs
    ],
)
@pytest.mark.parametrize("own_tokens", [False, True])
def test_sums_of_all_layers_equal_float64(
    layers: int,
    n: int,
    num_experts: int,
    top_k: int,
    d: int,
    samples: int,
    programs: int,
    own_tokens: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from some_moe.fast.ops import routing_stats as summing

    monkeypatch.setattr(summing, "PROGRAMS", programs)
    torch.manual_seed(n)
    queries = [torch.randn(n, d, device=DEVICE).bfloat16() for _ in range(layers)]
    queries[0][n // 2] = 0  # no direction
    experts = [torch.rand(n, num_experts, device=DEVICE).topk(top_k).indices for _ in range(layers)]
    counted = torch.rand((layers, n) if own_tokens else (n,), device=DEVICE) < 0.7
    place = torch.randint(n, (layers, samples), device=DEVICE)
    place[0, 0] = n // 2
    order = torch.randint(NOT_SAMPLED, (layers, samples), device=DEVICE)
    order[:, samples // 2 + 1 :] = NOT_SAMPLED
    once, again = (summing.sum_layers(experts, counted, queries, place, order, num_experts) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    for layer, (*sums, sample) in enumerate(zip(*once, strict=True)):
        enters = counted[layer] if own_tokens else counted
        check_sums(experts[layer], enters, queries[layer], *sums)
        expected = torch.where((order[layer] < NOT_SAMPLED)[:, None], units(queries[layer])[place[layer]], 0.0)
        assert torch.allclose(sample.double(), expected, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_huge_and_tiny_queries_are_sampled_at_unit_length(size: float) -> None:
    from some_moe.fast.ops.routing_stats import sum_layers

    query = torch.full((40, 64), size, device=DEVICE).bfloat16()
    experts = torch.zeros(40, 1, dtype=torch.int64, device=DEVICE)
    counted = torch.ones(40, dtype=torch.bool, device=DEVICE)
    first = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    *_, sample = sum_layers([experts] * 2, counted, [query] * 2, first, first, 16)
    assert torch.allclose(sample, torch.full((2, 1, 64), 0.125, device=DEVICE))


def test_queries_that_do_not_begin_at_an_aligned_address_are_summed() -> None:
    from some_moe.fast.ops.routing_stats import sum_layers

    torch.manual_seed(0)
    queries = [
        torch.randn(500 * 64 + 3, device=DEVICE).bfloat16()[shift:][: 500 * 64].view(500, 64) for shift in (0, 3)
    ]
    experts = [torch.rand(500, 16, device=DEVICE).topk(2).indices for _ in queries]
    counted = torch.ones(500, dtype=torch.bool, device=DEVICE)
    first = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    for layer, (*sums, _) in enumerate(zip(*sum_layers(experts, counted, queries, first, first, 16), strict=True)):
        check_sums(experts[layer], counted, queries[layer], *sums)


@pytest.mark.parametrize("token_fraction", [1.0, 0.5])
def test_a_model_that_sums_all_layers_at_once_records_what_its_layers_would(
    token_fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from some_moe import GravityConfig, ModelConfig, SomeLM, accelerate
    from some_moe.fast import statistics
    from some_moe.model.tokens import TokenInfo

    config = ModelConfig(d_model=64, num_layers=3, num_heads=2, vocab_size=512, num_experts=16, d_ffn=128, top_k=2)
    model = accelerate(SomeLM(config, GravityConfig(token_fraction=token_fraction), device=DEVICE))
    model.compute_in(torch.bfloat16)
    tokens = torch.randint(512, (3, 200), device=DEVICE)
    info = TokenInfo.of(tokens.shape, tokens.device, counted=torch.rand(3, 200, device=DEVICE) < 0.8, ids=tokens)
    found = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(statistics, "sums_come_together", lambda *_: False)
        found.append(model(tokens, info).routings)
    assert len({routing.counts.untyped_storage().data_ptr() for routing in found[0]}) == 1  # one tensor for all layers
    for left, right in zip(*found, strict=True):
        for name in ("counts", "pairs", "num_tokens", "sample_order", "raw_sum"):
            assert torch.equal(getattr(left, name), getattr(right, name)), name
        assert torch.allclose(left.query_sum, right.query_sum, atol=1e-4)
        assert torch.allclose(left.sample, right.sample, atol=1e-6)


def test_compiled_summaries_equal_launched_ones() -> None:
    from some_moe.config import GravityConfig
    from some_moe.fast.statistics import summarize
    from some_moe.hashing import make_layer_words
    from some_moe.model.tokens import TokenInfo

    torch.manual_seed(0)
    query = torch.randn(3, 500, 64, device=DEVICE).bfloat16()
    experts = torch.rand(3, 500, 16, device=DEVICE).topk(4).indices
    info = TokenInfo.of((3, 500), query.device, counted=torch.rand(3, 500, device=DEVICE) < 0.9)
    words = make_layer_words([0])[0].to(DEVICE)
    found = [
        run(experts, query, None, info, words, 16, GravityConfig())
        for run in (summarize, torch.compile(summarize, fullgraph=True, backend="aot_eager"))
    ]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
