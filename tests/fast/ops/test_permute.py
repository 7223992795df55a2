"""The permutation is that of a stable sort by expert, each expert's rows padded to whole tiles."""

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def permute_by_sort(experts: Tensor, num_experts: int, size: int, num_tiles: int) -> tuple[Tensor, Tensor]:
    """The row of each slot (N, K) and the expert of each tile (num_tiles,), by a sort."""
    slots = experts.flatten()
    counts = slots.bincount(minlength=num_experts)
    tiles = -(-counts // size)
    first_row, first_slot = (tiles.cumsum(0) - tiles) * size, counts.cumsum(0) - counts
    order = slots.argsort(stable=True)
    expert, place = slots[order], torch.arange(len(slots), device=slots.device)
    row = torch.empty_like(slots).index_put_((order,), first_row[expert] + place - first_slot[expert])
    owners = torch.arange(num_experts, device=slots.device).repeat_interleave(tiles)
    return row.view(experts.shape), torch.nn.functional.pad(owners, (0, num_tiles - len(owners)), value=-1)


def assert_permuted(experts: Tensor, num_experts: int, size: int) -> None:
    from some_moe.fast.ops.permute import max_tiles, permute_slots

    found = permute_slots(experts, num_experts, size)
    row, tile_expert = permute_by_sort(experts, num_experts, size, max_tiles(experts.numel(), num_experts, size))
    assert found.row.dtype == found.tile_expert.dtype == torch.int32
    assert torch.equal(found.row.long(), row)
    assert torch.equal(found.tile_expert.long(), tile_expert)
    assert int(found.num_tiles) == int((tile_expert >= 0).sum())


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize(
    ("n", "num_experts", "top_k"),
    [(1, 1, 1), (1, 4096, 3), (333, 5, 5), (1000, 64, 4), (700, 100, 3), (500, 512, 8), (300, 1500, 5)],
)
def test_slots_lie_where_a_stable_sort_puts_them(n: int, num_experts: int, top_k: int, size: int) -> None:
    torch.manual_seed(n)
    assert_permuted(torch.rand(n, num_experts, device=DEVICE).topk(top_k).indices, num_experts, size)


@pytest.mark.parametrize("size", [16, 128])
def test_experts_without_slots_take_no_tile(size: int) -> None:
    assert_permuted(torch.full((513, 1), 3, device=DEVICE), 7, size)
    assert_permuted(torch.randint(2, (300, 2), device=DEVICE) * 40 + 11, 64, size)


@pytest.mark.parametrize(("num_slots", "num_experts"), [(98_304, 64), (262_144, 512), (300_000, 4096)])
def test_many_slots_of_skewed_experts(num_slots: int, num_experts: int) -> None:
    torch.manual_seed(0)
    experts = (torch.rand(num_slots // 4, 4, device=DEVICE) ** 3 * num_experts).long()
    assert_permuted(experts, num_experts, 128)


def test_more_blocks_than_are_added_up_at_once() -> None:
    torch.manual_seed(1)
    assert_permuted(torch.randint(3, (140_000, 2), device=DEVICE), 3, 64)
