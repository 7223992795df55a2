"""A library that looks back: the text before a token decides how much of what a branch says is added.

A branch keeps what each word says for it: the logarithm of how much likelier it is in the branch's text than in text of
the old kind. These are added up over the text so far, older ones weighing less, and no sum falls below a floor, so that
another text is soon noticed. With the branch's prior the sums are log-odds between the branches and the base; their
softmax is each branch's share. The branch with the largest serves the token, and counts as much as its share. No later
token is looked at, and all layers share alike. Branches of weight 0 know nothing of this.

Shapes: B rows, T positions, E experts of base and branches, V words of the vocabulary, G branches that look back.
"""

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from some_moe.data.tokenizer import SPECIAL_TOKENS
from some_moe.model.attention import Cache
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.system.records import Branch

FADES = 0.98  # what a token says counts so much less at the next one
FLOOR = -4.0  # no sum is lower
LEAST = 0.01  # a branch of a smaller share does not run
UNSEEN = 0.5  # added to every count: a word that a text happens to lack says little
HALVINGS = 60  # of the interval in which a prior is looked for
FARTHEST = 1e3  # where it begins and ends


class Context(nn.Module):
    """How much of each expert's output is added at a token, by the text so far: `SomeLM.context`."""

    weights: Tensor  # (G,)

    def __init__(self, speaking: Iterable[nn.Module], weights: Tensor, places: list[slice], num_experts: int) -> None:
        """speaking: the first layer's parts of branches that look back, which keep their `words` and their `prior`.

        places: where their experts stand.
        """
        super().__init__()
        self.speaking = tuple(speaking)  # no modules of this one: they are saved where they are
        self.places, self.num_experts = places, num_experts
        self.register_buffer("weights", weights, persistent=False)

    @property
    def words(self) -> Tensor:
        """What each word says for each branch: (V, G)."""
        return torch.stack([branch.get_buffer("words") for branch in self.speaking], -1)

    @property
    def prior(self) -> Tensor:
        """What speaks for each branch before a word is read: (G,)."""
        return torch.stack([branch.get_buffer("prior") for branch in self.speaking])

    def forward(self, info: TokenInfo, cache: Cache | None) -> Tensor:
        """Shares (B, T, E) of a pass: see `TokenInfo`. A branch that learns has all tokens, whatever they say."""
        assert info.ids is not None
        if self.training and torch.is_grad_enabled():
            return torch.ones(*info.ids.shape, self.num_experts, device=info.ids.device)
        return self.share(self.add_up(info.ids, info.segments, cache))

    def share(self, sums: Tensor) -> Tensor:
        """What sums (B, T, G) leave to each expert (B, T, E): 1 for those of branches that do not look back."""
        shares = F.pad(sums + self.prior, (1, 0)).softmax(-1)[..., 1:]
        largest = shares == shares.amax(-1, keepdim=True)
        shares = torch.where(largest & (shares >= LEAST), shares, 0.0)
        found = shares.new_ones(*shares.shape[:-1], self.num_experts)
        for number, place in enumerate(self.places):
            found[..., place] = shares[..., number, None]
        return found

    def add_up(self, ids: Tensor, segments: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The sums (B, T, G) at the tokens ids (B, T); the last one is kept beside a cache.

        A token makes max(fades·sum + said, floor) of the sum before it. Such steps, joined, are steps of the same form,
        so all sums are found in log2(T) rounds.
        """
        said = self.weights * self.words[ids]
        fades, floors = torch.full_like(said, FADES), torch.full_like(said, FLOOR)
        if segments is not None:  # a new document knows nothing of the one before
            fades[:, 1:] *= (segments[:, 1:] == segments[:, :-1])[..., None]
        shift = 1
        while shift < ids.shape[1]:
            (fade, add, floor), before = (part[:, shift:] for part in (fades, said, floors)), slice(None, -shift)
            joined = (
                fade * fades[:, before],
                fade * said[:, before] + add,
                torch.maximum(fade * floors[:, before] + add, floor),
            )
            fades, said, floors = (
                torch.cat([whole[:, :shift], part], 1)
                for whole, part in zip((fades, said, floors), joined, strict=True)
            )
            shift *= 2
        if cache is not None and cache.context is not None:
            said = fades * cache.context + said
        sums = torch.maximum(said, floors)
        if cache is not None:
            cache.context = sums[:, -1:]
        return sums


def find_places(branches: list[Branch], num_old: int) -> list[slice]:
    """Where the experts of branches that look back stand, behind those of the base."""
    ends = list(accumulate((branch.experts for branch in branches), initial=num_old))
    places = [slice(*ends_of) for ends_of in pairwise(ends)]
    return [place for place, branch in zip(places, branches, strict=True) if branch.looks_back]


def look_back(model: SomeLM, branches: list[Branch]) -> SomeLM:
    """Let branches be chosen by the text before, in place, where any of them asks for it."""
    looking = [number for number, branch in enumerate(branches) if branch.looks_back]
    if looking:
        num_words, device = model.embedding.num_embeddings, model.embedding.weight.device
        library = model.layers[0].library
        parts = list(library.get_submodule("branches").children())
        speaking = [parts[number] for number in looking]
        for part in speaking:
            part.register_buffer("words", torch.zeros(num_words, device=device))
            part.register_buffer("prior", torch.zeros((), device=device))
        weights = torch.tensor([branches[number].looks_back for number in looking], device=device)
        places = find_places(branches, library.up.shape[0])
        model.context = Context(speaking, weights, places, model.model.num_experts)
    return model


def weigh_words(counts: Tensor, known: Tensor) -> Tensor:
    """What each word (V,) says for a text, by the counts (V,) of its words and of those of the old kind.

    Marks, such as the end of a document, say nothing.
    """
    new, old = (torch.log((of + UNSEEN) / (of + UNSEEN).sum()) for of in (counts, known))
    is_mark = torch.arange(len(counts), device=counts.device) < len(SPECIAL_TOKENS)
    return torch.where(is_mark, 0.0, new - old)


@torch.no_grad()
def let_speak(context: Context, counts: Tensor, known: Tensor) -> None:
    """Tell the only branch what words say for it."""
    context.speaking[0].get_buffer("words").copy_(weigh_words(counts, known))


@torch.no_grad()
def sum_rows(context: Context, ids: Tensor, lengths: list[int]) -> Tensor:
    """The sums (T, G) at the tokens ids (T,), row after row of these lengths."""
    sums = context.add_up(pad_sequence(list(torch.split(ids, lengths)), batch_first=True))
    return torch.cat([row[:length] for row, length in zip(sums, lengths, strict=True)])


@torch.no_grad()
def set_prior(context: Context, sums: Tensor, share: float) -> None:
    """Let the only branch have that share on the mean, where its sums (T,) are those of text of the old kind."""
    low, high = -FARTHEST, FARTHEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if (sums.double() + middle).sigmoid().mean() > share else (middle, high)
    context.speaking[0].get_buffer("prior").fill_(low)
