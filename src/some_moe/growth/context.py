"""A library that looks back: the text before a token has a say in which branch serves it.

What speaks for a branch at a token is by how much the best of its keys, without a bias, beats the last expert of the
base that would be chosen there. The mean of it over the text so far, older tokens weighing less, times the branch's
weight, is added to the scores of the branch when experts are chosen. No later token is looked at, gates are as before,
and branches of weight 0 are chosen as if nothing looked back.

Shapes: B rows, T positions, E experts of base and branches, G branches, N new experts, K chosen, D model width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from some_moe.model.router import KeyRouter
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.system.records import Branch

FADES = 0.95  # what a token says counts so much less at the next one


class ContextRouter(KeyRouter):
    """A router whose branches are chosen with an eye on the text before."""

    remembers = True  # beside a cache, which the fast model does not bear
    sizes: tuple[int, ...]  # experts of each branch
    weights: tuple[float, ...]  # of what was said before, by branch
    layer: int
    info: TokenInfo | None  # of the present pass

    def forward(self, query: Tensor, info: TokenInfo, top_k: int) -> tuple[Tensor, Routing]:
        """As `KeyRouter.forward`."""
        self.info = info
        try:
            found: tuple[Tensor, Routing] = super().forward(query, info, top_k)
        finally:
            self.info = None
        return found

    def choose(self, query: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `KeyRouter.choose`."""
        scores = self.score(query)
        leaning = self.lean(scores.detach(), top_k)
        experts = self.select(scores.detach() + self.state.bias + leaning, top_k)
        tempered = scores / (self.model.temperature if self.temperature is None else self.temperature())
        return experts, self.weigh(tempered, experts), tempered

    def lean(self, scores: Tensor, top_k: int) -> Tensor:
        """What is added to scores (B, T, E): nothing to those of the base."""
        num_old = scores.shape[-1] - sum(self.sizes)
        last = (scores[..., :num_old] + self.state.bias[:num_old]).topk(top_k, dim=-1).values[..., -1:]
        best = [part.amax(-1) for part in torch.split(scores[..., num_old:], list(self.sizes), dim=-1)]
        mean = self.remember(torch.stack(best, -1) - last)
        weighed = mean * torch.tensor(self.weights, dtype=mean.dtype, device=mean.device)
        sizes = torch.tensor(self.sizes, device=mean.device)
        return F.pad(weighed.repeat_interleave(sizes, dim=-1, output_size=sum(self.sizes)), (num_old, 0))

    def lean_by_row(self, scores: Tensor, top_k: int, lengths: list[int]) -> Tensor:
        """The same for tokens (T, E), row after row of these lengths."""
        padded = pad_sequence(list(torch.split(scores, lengths)), batch_first=True)
        leaning = self.lean(padded, top_k)
        return torch.cat([row[:length] for row, length in zip(leaning, lengths, strict=True)])

    def remember(self, said: Tensor) -> Tensor:
        """The fading mean (B, T, G) of what was said (B, T, G) up to each token, with what is kept beside a cache."""
        info, length = self.info, said.shape[1]
        place = torch.arange(length, device=said.device)
        age = place[:, None] - place
        weights = torch.where(age >= 0, FADES ** age.clamp(min=0).to(said.dtype), 0.0)  # (T, T)
        if info is not None and info.segments is not None:
            weights = weights * (info.segments[:, :, None] == info.segments[:, None])
        total = weights @ said
        count = weights.sum(-1, keepdim=True).expand(len(said), -1, -1)
        kept = torch.cat([total, count], dim=-1)  # (B, T, G + 1)
        if info is not None and info.memory is not None:
            if self.layer in info.memory:
                kept = kept + FADES ** (place[:, None] + 1).to(said.dtype) * info.memory[self.layer]
            info.memory[self.layer] = kept[:, -1:]
        return kept[..., :-1] / kept[..., -1:]


def look_back(model: SomeLM, branches: list[Branch]) -> SomeLM:
    """Let branches be chosen with an eye on the text before, in place, where any of them asks for it."""
    if any(branch.looks_back for branch in branches):
        for number, layer in enumerate(model.layers):
            router = layer.key_router
            assert router is not None
            router.__class__ = ContextRouter
            assert isinstance(router, ContextRouter)
            router.sizes = tuple(branch.experts for branch in branches)
            router.weights = tuple(branch.looks_back for branch in branches)
            router.layer, router.info = number, None
    return model
