"""The first samples are the smallest of all numbers, in order, with the places they stand at."""

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NOT_SAMPLED = torch.iinfo(torch.int64).max


def draw(n: int) -> Tensor:
    torch.manual_seed(n)
    return torch.randint(NOT_SAMPLED, (n,), device=DEVICE)


@pytest.mark.parametrize(
    ("n", "size"),
    [(1, 1), (32, 32), (1000, 7), (1024, 64), (1025, 32), (4097, 33), (24_576, 32), (24_576, 64), (150_000, 64)],
)
def test_first_samples_are_those_of_a_full_sort(n: int, size: int) -> None:
    from some_moe.kernels.sampling import first_samples

    order = draw(n)
    values, places = first_samples(order, size)
    expected = order.sort()
    assert torch.equal(values, expected.values[:size])
    assert torch.equal(places, expected.indices[:size])


@pytest.mark.parametrize(("n", "num_sampled"), [(40, 3), (3000, 0), (3000, 10), (24_577, 31)])
def test_tokens_left_out_come_last_and_stand_within_the_batch(n: int, num_sampled: int) -> None:
    from some_moe.kernels.sampling import first_samples

    order = torch.full((n,), NOT_SAMPLED, device=DEVICE)
    some = torch.randperm(n, device=DEVICE)[:num_sampled]
    order[some] = draw(n)[some]
    values, places = first_samples(order, 32)
    expected = order.sort()
    assert torch.equal(values, expected.values[:32])
    assert torch.equal(places[:num_sampled], expected.indices[:num_sampled])
    assert torch.equal(order[places], values)
