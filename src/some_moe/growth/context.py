"""A library that looks back: the text before a token has a say in which branch serves it.

A branch keeps what each word says for it: the logarithm of how much likelier it is in the branch's text than in text of
the old kind. The sum of this over the text so far, older tokens weighing less, times the branch's weight, is added to
its scores when experts are chosen, in every layer alike. No later token is looked at, gates are as before, and branches
of weight 0 are chosen as if nothing looked back.

Shapes: B rows, T positions, E experts of base and branches, V words of the vocabulary, G branches that look back.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from some_moe.data.tokenizer import SPECIAL_TOKENS
from some_moe.model.attention import Cache
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.system.records import Branch

FADES = 0.95  # what a token says counts so much less at the next one
UNSEEN = 0.5  # added to every count: a word that a text happens to lack says little


class Context(nn.Module):
    """What the text so far adds to scores when experts are chosen: `SomeLM.context`."""

    reach: Tensor  # (G, E): each branch's weight at its own experts, and 0 at others

    def __init__(self, speaking: Iterable[nn.Module], reach: Tensor) -> None:
        """speaking: the first layer's parts of branches that look back, which keep their `words`."""
        super().__init__()
        self.speaking = tuple(speaking)  # no modules of this one: they are saved where they are
        self.register_buffer("reach", reach, persistent=False)

    @property
    def words(self) -> Tensor:
        """What each word says for each branch: (V, G)."""
        return torch.stack([branch.get_buffer("words") for branch in self.speaking], -1)

    def forward(self, info: TokenInfo, cache: Cache | None) -> Tensor:
        """What is added to the scores of a pass (B, T, E)."""
        assert info.ids is not None
        return self.lean(info.ids, info.segments, cache)

    def lean(self, ids: Tensor, segments: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The same at the tokens ids (B, T): nothing for experts of the base."""
        return self.add_up(self.words[ids], segments, cache) @ self.reach

    def add_up(self, said: Tensor, segments: Tensor | None, cache: Cache | None) -> Tensor:
        """The fading sum (B, T, G) of what was said (B, T, G) up to each token; the last one is kept beside a cache."""
        place = torch.arange(said.shape[1], device=said.device)
        age = place[:, None] - place
        counts = torch.where(age >= 0, FADES ** age.clamp(min=0).to(said.dtype), 0.0)  # (T, T)
        if segments is not None:
            counts = counts * (segments[:, :, None] == segments[:, None])
        total = counts @ said
        if cache is not None:
            if cache.context is not None:
                total = total + FADES ** (place[:, None] + 1).to(said.dtype) * cache.context
            cache.context = total[:, -1:]
        return total


def look_back(model: SomeLM, branches: list[Branch]) -> SomeLM:
    """Let branches be chosen with an eye on the text before, in place, where any of them asks for it."""
    looking = [number for number, branch in enumerate(branches) if branch.looks_back]
    if looking:
        num_words, device = model.embedding.num_embeddings, model.embedding.weight.device
        library = model.layers[0].library
        parts = list(library.get_submodule("branches").children())
        speaking = [parts[number] for number in looking]
        for part in speaking:
            part.register_buffer("words", torch.zeros(num_words, device=device))
        owner = torch.repeat_interleave(torch.tensor([branch.experts for branch in branches]))
        own = torch.stack([(owner == number) * branches[number].looks_back for number in looking])
        model.context = Context(speaking, F.pad(own, (library.up.shape[0], 0)).to(device))
    return model


def weigh_words(counts: Tensor, known: Tensor) -> Tensor:
    """What each word (V,) says for a text, by the counts (V,) of its words and of those of the old kind.

    Marks, such as the end of a document, say nothing.
    """
    new, old = (torch.log((of + UNSEEN) / (of + UNSEEN).sum()) for of in (counts, known))
    is_mark = torch.arange(len(counts), device=counts.device) < len(SPECIAL_TOKENS)
    return torch.where(is_mark, 0.0, new - old)


@torch.no_grad()
def let_speak(model: SomeLM, counts: Tensor, known: Tensor) -> None:
    """Tell the only branch of a model, if it looks back, what words say for it."""
    if isinstance(model.context, Context):
        model.context.speaking[0].get_buffer("words").copy_(weigh_words(counts, known))


@torch.no_grad()
def lean_on(model: SomeLM, ids: Tensor, lengths: list[int]) -> Tensor | None:
    """What is added to scores (T, E) at the tokens ids (T,), row after row of these lengths; None where nothing is."""
    if not isinstance(model.context, Context):
        return None
    leaning = model.context.lean(pad_sequence(list(torch.split(ids, lengths)), batch_first=True))
    return torch.cat([row[:length] for row, length in zip(leaning, lengths, strict=True)])
