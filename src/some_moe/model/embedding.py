"""The token embedding, which can read its rows from a copy in another type. Shapes: V vocabulary, D model width."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.experts import has_triton

SUMMED = (torch.bfloat16, torch.float16, torch.float32)  # gradients that the project's own kernels add up


class GatherRows(torch.autograd.Function):
    """Rows of a copy (V, D) of the weight, whose gradient is added up in the weight's own type."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows, ctx.dtype = len(weight), weight.dtype
        return F.embedding(tokens, copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        if grad.is_cuda and grad.dtype in SUMMED and ctx.dtype == torch.float32 and has_triton():
            from some_moe.fast.ops.embedding_grad import embedding_gradient

            return embedding_gradient(grad, tokens, ctx.num_rows), None, None
        added = torch.ops.aten.embedding_dense_backward(grad.to(ctx.dtype), tokens, ctx.num_rows, -1, False)
        return added, None, None


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
