"""Copies of a model's trained weights in the type that a pass computes in.

Autocast would cast every weight where it is used, and every gradient where it is made: a launch for each, which takes
longer than the work. Here two launches copy all weights and biases, and one all gradients of the weights. The numbers
are the same, but for two: gradients of biases are not rounded at all; and the gradient of an embedding, which gives
rows of its copy, is not either, but a GPU adds it up in an order of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from some_moe.fast.ops.linear import Linear
from some_moe.model.attention import Attention
from some_moe.model.embedding import Embedding


def copy_stacked(stacks: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Copy the tensors of each stack, one below the other, into a tensor of its own."""
    copies = [stack[0].new_empty((sum(map(len, stack)), *stack[0].shape[1:]), dtype=dtype) for stack in stacks]
    places = [copy.split_with_sizes(list(map(len, stack))) for copy, stack in zip(copies, stacks, strict=True)]
    torch._foreach_copy_(list(chain(*places)), list(chain(*stacks)))
    return copies


class CopyTensors(torch.autograd.Function):
    """`copy_stacked` for autograd, which wants the tensors of all stacks in a row."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, sizes: Sequence[int], num_followed: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """sizes: tensors in each stack; num_followed: so many stacks, the first ones, get gradients by their copies."""
        ctx.set_materialize_grads(False)  # a weight that was not used has no gradient, rather than one of zeros
        rest = iter(tensors)
        stacks = [[next(rest) for _ in range(size)] for size in sizes]
        ctx.heights, ctx.dtype = [list(map(len, stack)) for stack in stacks], tensors[0].dtype
        copies = copy_stacked(stacks, dtype)
        ctx.mark_non_differentiable(*copies[num_followed:])
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        found: list[Tensor | None] = []
        for grad, heights in zip(grads, ctx.heights, strict=True):
            found += [None] * len(heights) if grad is None else grad.split_with_sizes(heights)
        given = [grad for grad in found if grad is not None]
        widened = [grad.new_empty(grad.shape, dtype=ctx.dtype) for grad in given]
        torch._foreach_copy_(widened, given)
        rest = iter(widened)
        return None, None, None, *(None if grad is None else next(rest) for grad in found)


@contextmanager
def weights_copied(model: nn.Module, dtype: torch.dtype, *, enabled: bool = True) -> Iterator[None]:
    """Within, linear maps and embeddings below `model` use copies in dtype; gradients go to the parameters as ever.

    The backward pass belongs within, too: activations that it makes anew must be made from the same copies.
    """
    modules = list(model.modules()) if enabled else []
    holders = [module for module in modules if isinstance(module, Linear | Attention)]
    embeddings = [module for module in modules if isinstance(module, Embedding) and module.may_round]
    if not holders:
        yield
        return
    # First what gets its gradient by its copy; the small ones last, for a launch of their own.
    stacks: list[list[Tensor]] = [[each.weight for each in holder.maps] for holder in holders]
    stacks += [[embedding.weight] for embedding in embeddings]
    stacks += [[each.bias for each in holder.maps] for holder in holders]
    copies = iter(CopyTensors.apply(dtype, list(map(len, stacks)), len(holders), *chain(*stacks)))  # type: ignore[no-untyped-call]
    weights = list(islice(copies, len(holders)))
    try:
        for embedding in embeddings:
            embedding.copy = next(copies)
        for holder, weight, bias in zip(holders, weights, copies, strict=True):
            holder.copies = (weight, bias)
        yield
    finally:
        for embedding in embeddings:
            embedding.copy = None
        for holder in holders:
            holder.copies = None
