"""Tokens sampled on a GPU are those that a CPU samples, in the same order."""

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NOT_SAMPLED = torch.iinfo(torch.int64).max


def draw(layers: int, n: int) -> Tensor:
    torch.manual_seed(n)
    return torch.randint(NOT_SAMPLED, (layers, n), device=DEVICE)


@pytest.mark.parametrize(
    ("n", "size"),
    [(1, 1), (32, 32), (1000, 7), (1024, 64), (1025, 32), (4097, 33), (24_576, 32), (24_576, 64), (150_000, 64)],
)
@pytest.mark.parametrize("layers", [1, 5])
def test_the_smallest_are_those_of_a_full_sort(layers: int, n: int, size: int) -> None:
    from some_moe.fast.ops.sampling import smallest

    order = draw(layers, n)
    places, values = smallest(order, size)
    expected = order.sort(dim=1)
    assert torch.equal(values, expected.values[:, :size])
    assert torch.equal(places, expected.indices[:, :size])


@pytest.mark.parametrize(("n", "num_sampled"), [(40, 3), (3000, 0), (3000, 10), (24_577, 31)])
def test_tokens_left_out_come_last_and_stand_within_the_batch(n: int, num_sampled: int) -> None:
    from some_moe.fast.ops.sampling import smallest

    order = torch.full((2, n), NOT_SAMPLED, device=DEVICE)
    some = torch.randperm(n, device=DEVICE)[:num_sampled]
    order[:, some] = draw(2, n)[:, some]
    places, values = smallest(order, 32)
    expected = order.sort(dim=1)
    assert torch.equal(values, expected.values[:, :32])
    assert torch.equal(places[:, :num_sampled], expected.indices[:, :num_sampled])
    assert torch.equal(order.gather(1, places), values)


@pytest.mark.parametrize(
    ("rows", "positions", "num_samples", "token_fraction", "share"),
    [
        (32, 768, 32, 1.0, 1.0),
        (5, 333, 64, 1.0, 0.7),
        (7, 100, 33, 0.3, 0.9),
        (3, 1000, 32, 0.5, 0.01),  # fewer counted tokens than samples
        (2, 9, 40, 1.0, 1.0),  # fewer tokens than samples
        (4, 300, 100, 1.0, 0.9),  # more samples than the kernel takes
    ],
)
def test_samples_on_a_gpu_are_those_on_a_cpu(
    rows: int, positions: int, num_samples: int, token_fraction: float, share: float
) -> None:
    from some_moe.config import GravityConfig
    from some_moe.fast.statistics import choose_samples
    from some_moe.hashing import make_layer_words, make_salt
    from some_moe.model import routing
    from some_moe.model.tokens import TokenInfo

    torch.manual_seed(rows)
    config = GravityConfig(num_samples=num_samples, token_fraction=token_fraction)
    words, numbers = make_layer_words(range(8)), torch.randperm(1000)[:rows]
    counted = torch.rand(rows, positions) < share
    here = TokenInfo(counted=counted, rows=numbers, salt=make_salt(2**40 + 3, 7))
    there = TokenInfo(counted=counted.to(DEVICE), rows=numbers.to(DEVICE), salt=here.salt.to(DEVICE))
    expected_place, expected_order = routing.choose_samples(here, words, config)
    place, order = choose_samples(there, words.to(DEVICE), config)
    sampled = expected_order < NOT_SAMPLED
    assert sampled.any()
    assert torch.equal(order.cpu(), expected_order)
    assert torch.equal(place.cpu()[sampled], expected_place[sampled])
    assert bool(((place >= 0) & (place < rows * positions)).all())
