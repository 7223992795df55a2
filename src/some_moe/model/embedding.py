"""The token embedding, which can read its rows from a copy in another type. Shapes: V vocabulary, D model width."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.kernels import has_triton

MANY = 3072  # indices up to which torch adds up a gradient on a GPU by another kernel, which rounds as it goes
SUMMED = (torch.bfloat16, torch.float16, torch.float32)  # gradients that the project's own kernels add up


class GatherRows(torch.autograd.Function):
    """Rows of a copy (V, D) of the weight, whose gradient is added up in its own type or, on a GPU, in float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows, ctx.dtype = len(weight), weight.dtype
        return F.embedding(tokens, copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        if grad.is_cuda and grad.dtype in SUMMED and ctx.dtype == torch.float32 and has_triton():
            from some_moe.kernels.embedding import embedding_gradient

            return embedding_gradient(grad, tokens, ctx.num_rows), None, None
        # By torch on a GPU sums over many tokens are in float32 whatever they are of, and rounded once, as the gradient
        # of any product is; and numbers half as wide are sorted in half the time. Elsewhere sums are as wide as the
        # gradient.
        at_once = grad.is_cuda and tokens.numel() > MANY
        given = (grad, tokens.int()) if at_once else (grad.to(ctx.dtype), tokens)
        added = torch.ops.aten.embedding_dense_backward(*given, ctx.num_rows, -1, False)
        return added.to(ctx.dtype), None, None


class Embedding(nn.Embedding):
    """A vector for each token."""

    def __init__(self, num_tokens: int, d_model: int, *, may_round: bool) -> None:
        """may_round: nothing is done to the vectors before they are rounded to the type of the residual stream."""
        super().__init__(num_tokens, d_model)
        self.may_round = may_round
        self.copy: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) → (B, T, D), in the type of the copy where there is one."""
        if self.copy is None:
            return super().forward(tokens)
        x: Tensor = GatherRows.apply(self.weight, self.copy, tokens)  # type: ignore[no-untyped-call]
        return x
