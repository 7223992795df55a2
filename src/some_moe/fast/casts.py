"""Casts of a model's trained weights to the type that a pass computes in, all at once.

Autocast would cast every weight where it is used, and every gradient where it is made: a launch for each, which takes
longer than the work. Here two launches cast all weights and biases, and one all gradients of the weights. The numbers
are the same, but for two: gradients of biases are not rounded at all; and the gradient of an embedding, which gives
rows of its cast, is not either, but a GPU adds it up in an order of its own.

Shapes: I inputs, O outputs, V vocabulary, D model width.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.model.attention import Attention
from some_moe.model.linear import Linear


class Cast(NamedTuple):
    """What a linear map computes by."""

    weight: Tensor  # (O, I), by which the parameter's gradient goes back
    bias: Tensor  # (O,), detached: whoever adds it makes the gradient of the parameter


Casts = dict[str, Cast]  # by the name of the map, below the module that they are of


class AttachBias(torch.autograd.Function):
    """y (…, O), to which detached biases, of O elements in all, were added: here they get their gradient, dbias."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *biases: Tensor) -> Tensor:
        ctx.sizes = [len(bias) for bias in biases]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        # In float32 and left so: dbias is small enough not to be rounded on its way.
        sums = grad.flatten(0, -2).sum(0, dtype=torch.float32)
        return grad, *sums.split_with_sizes(ctx.sizes)


def attach_bias(y: Tensor, *biases: Tensor) -> Tensor:
    found: Tensor = AttachBias.apply(y, *biases)  # type: ignore[no-untyped-call]
    return found


def linear(x: Tensor, layer: nn.Linear, cast: Cast) -> Tensor:
    """layer(x), computed by its cast."""
    return attach_bias(F.linear(x, *cast), layer.bias)


def copy_stacked(stacks: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Copy the tensors of each stack, one below the other, into a tensor of its own."""
    copies = [stack[0].new_empty((sum(map(len, stack)), *stack[0].shape[1:]), dtype=dtype) for stack in stacks]
    places = [copy.split_with_sizes(list(map(len, stack))) for copy, stack in zip(copies, stacks, strict=True)]
    torch._foreach_copy_(list(chain(*places)), list(chain(*stacks)))
    return copies


class CastTensors(torch.autograd.Function):
    """`copy_stacked` for autograd, which wants the tensors of all stacks in a row."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, sizes: Sequence[int], num_followed: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """sizes: tensors in each stack; num_followed: so many stacks, the first ones, get gradients by their casts."""
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


def list_maps(root: nn.Module) -> dict[str, tuple[nn.Linear, ...]]:
    """Every linear map below `root`, by name; attention's first three are one, for one wide product makes them all."""
    maps: dict[str, tuple[nn.Linear, ...]] = {}
    for name, module in root.named_modules():
        place = f"{name}." if name else ""
        if isinstance(module, Attention):
            maps[f"{place}qkv"] = (module.query, module.key, module.value)
            maps[f"{place}out"] = (module.out,)
        elif isinstance(module, Linear) and f"{name.rpartition('.')[0]}.qkv".lstrip(".") not in maps:
            maps[name] = (module,)
    return maps


def cast_maps(
    root: nn.Module, dtype: torch.dtype, embedding: nn.Embedding | None = None
) -> tuple[Casts, Tensor | None]:
    """Casts of every linear map below `root`, and of an embedding, where one is given: (V, D), without a gradient."""
    maps = list_maps(root)
    if all(layer.weight.dtype == dtype for layer in chain(*maps.values())):
        return {name: share_parameters(parts) for name, parts in maps.items()}, None
    # First what gets its gradient by its cast; the small ones last, for a launch of their own.
    stacks: list[list[Tensor]] = [[part.weight for part in parts] for parts in maps.values()]
    stacks += [] if embedding is None else [[embedding.weight]]
    stacks += [[part.bias for part in parts] for parts in maps.values()]
    made = list(CastTensors.apply(dtype, list(map(len, stacks)), len(maps), *chain(*stacks)))  # type: ignore[no-untyped-call]
    weights, rest = made[: len(maps)], made[len(maps) :]
    rows = None if embedding is None else rest.pop(0)
    return {name: Cast(*pair) for name, pair in zip(maps, zip(weights, rest, strict=True), strict=True)}, rows


def share_parameters(parts: Sequence[nn.Linear]) -> Cast:
    """The parameters themselves, where no other type is asked for."""
    if len(parts) == 1:
        return Cast(parts[0].weight, parts[0].bias.detach())
    return Cast(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]).detach())


def below(casts: Casts, name: str) -> Casts:
    """The casts below the module called `name`."""
    return {path.removeprefix(f"{name}."): cast for path, cast in casts.items() if path.startswith(f"{name}.")}


class GatherRows(torch.autograd.Function):
    """Rows of a cast (V, D) of an embedding, whose gradient is added up in the parameter's own type."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows, ctx.dtype = len(weight), weight.dtype
        return F.embedding(tokens, cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        if grad.is_cuda and ctx.dtype == torch.float32:
            from some_moe.fast.ops.embedding_grad import embedding_gradient

            return embedding_gradient(grad, tokens, ctx.num_rows), None, None
        added = torch.ops.aten.embedding_dense_backward(grad.to(ctx.dtype), tokens, ctx.num_rows, -1, False)
        return added, None, None


def embed(tokens: Tensor, embedding: nn.Embedding, cast: Tensor | None) -> Tensor:
    """tokens (B, T) → (B, T, D), in the type of the cast where there is one."""
    if cast is None:
        x: Tensor = embedding(tokens)
        return x
    rows: Tensor = GatherRows.apply(embedding.weight, cast, tokens)  # type: ignore[no-untyped-call]
    return rows
