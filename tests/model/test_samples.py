"""Samples are the first counted tokens of each layer's order, whoever chooses them, and however a batch is split."""

from functools import reduce
from operator import add

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from some_moe import GravityConfig, SomeLM
from some_moe.hashing import make_layer_words, make_salt, sample_order
from some_moe.model.gravity import bring_forward
from some_moe.model.routing import NOT_SAMPLED, Routing, choose_samples, summarize
from some_moe.model.tokens import TokenInfo
from tests.shared.isolation import in_new_process
from tests.shared.variants import BASE, make_config

SALT = make_salt(3, 7)
WORDS = make_layer_words(range(3))
ROWS = torch.tensor([4, 0, 9, 2])


def draw_counted(share: float, length: int = 30) -> Tensor:
    return torch.rand(len(ROWS), length, generator=torch.Generator().manual_seed(0)) < share


@pytest.mark.parametrize("share", [1.0, 0.6, 0.05])
@pytest.mark.parametrize("token_fraction", [1.0, 0.4])
def test_samples_are_the_first_counted_tokens_of_each_layers_order(share: float, token_fraction: float) -> None:
    counted = draw_counted(share)
    info = TokenInfo(counted=counted, rows=ROWS, salt=SALT)
    places, orders = choose_samples(info, WORDS, GravityConfig(token_fraction=token_fraction))
    for layer in range(3):
        order = sample_order(SALT, layer, ROWS, counted.shape[1])
        enters = counted & (order < token_fraction * 2**63)
        expected = sorted((number, place) for place, number in enumerate(order[enters].tolist()))[:32]
        found, place = orders[layer], places[layer]
        num_sampled = len(expected)
        assert found.tolist() == [number for number, _ in expected] + (32 - num_sampled) * [NOT_SAMPLED]
        assert torch.equal(order.flatten()[place[:num_sampled]], found[:num_sampled])
        assert enters.flatten()[place[:num_sampled]].all()
        alone = choose_samples(info, WORDS[layer], GravityConfig(token_fraction=token_fraction))
        assert torch.equal(alone[0], place)
        assert torch.equal(alone[1], found)


def test_a_batch_with_fewer_tokens_than_samples_leaves_places_empty() -> None:
    info = TokenInfo(counted=torch.ones(4, 2, dtype=torch.bool), rows=ROWS, salt=SALT)
    place, order = choose_samples(info, WORDS, GravityConfig())
    assert place.shape == order.shape == (3, 32)
    assert (order[:, 8:] == NOT_SAMPLED).all()
    assert all(set(places) == set(range(8)) for places in place[:, :8].tolist())


def record(query: Tensor, rows: Tensor, counted: Tensor, config: GravityConfig, mean: Tensor | None = None) -> Routing:
    info = TokenInfo(counted=counted, rows=rows, salt=SALT)
    experts = torch.zeros(*counted.shape, 1, dtype=torch.int64)
    return Routing(**summarize(experts, query, mean, info, WORDS[1], 2, config))


@pytest.mark.parametrize("mean", [None, torch.ones(5, dtype=torch.float64)], ids=["plain", "centred"])
@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[3], [1], [0], [2]]])
def test_queries_without_direction_leave_their_places_empty_however_the_batch_is_split(
    parts: list[list[int]], mean: Tensor | None
) -> None:
    config = GravityConfig(num_samples=12)
    source = torch.Generator().manual_seed(1)
    query = torch.randn(4, 9, 5, generator=source, dtype=torch.float64)
    query[torch.rand(4, 9, generator=source) < 0.4] = 0.0 if mean is None else 1.0
    counted = draw_counted(0.9, 9)
    whole = record(query, ROWS, counted, config, mean)
    assert (whole.sample_order < NOT_SAMPLED).all()
    empty = (whole.sample == 0).all(-1)
    assert 0 < int(empty.sum()) < 12
    split = reduce(add, (record(query[part], ROWS[part], counted[part], config, mean) for part in parts))
    assert torch.equal(split.sample_order, whole.sample_order)
    assert torch.equal(split.sample, whole.sample)


def test_queries_with_a_direction_are_brought_forward_in_order() -> None:
    sample = torch.tensor([[[0.0, 0.0], [0.6, 0.8], [0.0, 0.0], [0.0, -1.0]], [[1.0, 0.0]] + 3 * [[0.0, 0.0]]])
    found, number = bring_forward(sample)
    assert number.tolist() == [[2], [1]]
    assert torch.equal(found[0, :2], sample[0, [1, 3]])
    assert torch.equal(found[1, :1], sample[1, :1])
    assert bring_forward(torch.zeros(3, 2))[1].tolist() == [0]


@pytest.mark.parametrize("kind", ["plain", "centred", "hash"])
@pytest.mark.parametrize("token_fraction", [1.0, 0.5])
def test_every_layer_has_samples_of_its_own(kind: str, token_fraction: float) -> None:
    gravity = GravityConfig.off(token_fraction=token_fraction, num_samples=6)
    model = SomeLM(make_config(kind), gravity, seed=3)
    tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    info = TokenInfo.of(
        tokens.shape, tokens.device, counted=draw_counted(0.8, 9), rows=ROWS, seed=3, step=2, ids=tokens
    )
    with torch.no_grad():
        orders = torch.stack([routing.sample_order for routing in model(tokens, info).routings])
    assert (orders < NOT_SAMPLED).all()
    assert len(orders.unique()) == orders.numel()


def count_compilations() -> int:
    """How often the routers of three layers, called one after the other, are compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    model = SomeLM(BASE)
    info = TokenInfo(counted=torch.ones(len(ROWS), 9, dtype=torch.bool), rows=ROWS, salt=SALT)
    for layer in model.layers:
        router = layer.key_router
        assert router is not None
        query = torch.randn(4, 9, 24)
        expected = router(query, info, 2)[1]
        router.compile(backend=counter, fullgraph=True, dynamic=False)
        found = router(query, info, 2)[1]
        assert torch.equal(found.sample_order, expected.sample_order)
        assert torch.allclose(found.sample, expected.sample)
    return int(counter.frame_count)


def test_routers_are_compiled_once_for_all_layers() -> None:
    assert in_new_process(count_compilations) == 1
