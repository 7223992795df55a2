"""A library that looks back: the text before a token has a say in which branch serves it.

A branch keeps what each word says for it: the logarithm of how much likelier it is in the branch's text than in text of
the old kind. The sum of this over the text so far, older tokens weighing less, times the branch's weight, is added to
its scores when experts are chosen, in every layer alike. No later token is looked at, gates are as before, and branches
of weight 0 are chosen as if nothing looked back.

Shapes: B rows, T positions, E experts of base and branches, V words of the vocabulary, G branches that look back.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from some_moe.data.tokenizer import SPECIAL_TOKENS
from some_moe.model.router import KeyRouter
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.system.records import Branch

FADES = 0.95  # what a token says counts so much less at the next one
UNSEEN = 0.5  # added to every count: a word that a text happens to lack says little


class ContextRouter(KeyRouter):
    """A router whose branches are chosen with an eye on the text before."""

    remembers = True  # beside a cache, which the fast model does not bear
    speaking: tuple[nn.Module, ...]  # the first layer's parts of branches that look back, whose `words` all layers use
    weights: Tensor  # (G,)
    whose: Tensor  # (E,) which of these an expert belongs to; G: to none
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
        assert self.info is not None
        assert self.info.ids is not None
        scores = self.score(query)
        leaning = self.lean(self.info.ids, self.info).to(scores.dtype)
        experts = self.select(scores.detach() + self.state.bias + leaning, top_k)
        tempered = scores / (self.model.temperature if self.temperature is None else self.temperature())
        return experts, self.weigh(tempered, experts), tempered

    def lean(self, ids: Tensor, info: TokenInfo | None = None) -> Tensor:
        """What is added to scores (B, T, E) at the tokens ids (B, T): nothing to those of the base."""
        words = torch.stack([branch.get_buffer("words") for branch in self.speaking], -1)
        return F.pad(self.remember(words[ids], info) * self.weights, (0, 1))[..., self.whose]

    def remember(self, said: Tensor, info: TokenInfo | None) -> Tensor:
        """The fading sum (B, T, G) of what was said (B, T, G) up to each token, with what is kept beside a cache."""
        place = torch.arange(said.shape[1], device=said.device)
        age = place[:, None] - place
        counts = torch.where(age >= 0, FADES ** age.clamp(min=0).to(said.dtype), 0.0)  # (T, T)
        if info is not None and info.segments is not None:
            counts = counts * (info.segments[:, :, None] == info.segments[:, None])
        total = counts @ said
        if info is not None and info.memory is not None:
            if self.layer in info.memory:
                total = total + FADES ** (place[:, None] + 1).to(said.dtype) * info.memory[self.layer]
            info.memory[self.layer] = total[:, -1:]
        return total


def look_back(model: SomeLM, branches: list[Branch]) -> SomeLM:
    """Let branches be chosen with an eye on the text before, in place, where any of them asks for it."""
    looking = [number for number, branch in enumerate(branches) if branch.looks_back]
    if not looking:
        return model
    num_words, device = model.embedding.num_embeddings, model.embedding.weight.device
    library = model.layers[0].library
    parts = list(library.get_submodule("branches").children())
    speaking = tuple(parts[number] for number in looking)
    for part in speaking:
        part.register_buffer("words", torch.zeros(num_words, device=device))
    owners = [looking.index(number) if number in looking else len(looking) for number in range(len(branches))]
    num_old = library.up.shape[0]
    whose = [len(looking)] * num_old + [owners[n] for n, branch in enumerate(branches) for _ in range(branch.experts)]
    weights = torch.tensor([branches[number].looks_back for number in looking], device=device)
    for number, layer in enumerate(model.layers):
        router = layer.key_router
        assert router is not None
        router.__class__ = ContextRouter
        assert isinstance(router, ContextRouter)
        router.speaking, router.layer, router.info = speaking, number, None
        router.register_buffer("weights", weights, persistent=False)
        router.register_buffer("whose", torch.tensor(whose, device=device), persistent=False)
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
    router = model.layers[0].key_router
    if isinstance(router, ContextRouter):
        router.speaking[0].get_buffer("words").copy_(weigh_words(counts, known))


@torch.no_grad()
def lean_on(model: SomeLM, ids: Tensor, lengths: list[int]) -> Tensor | None:
    """What is added to scores (T, E) at the tokens ids (T,), row after row of these lengths; None where nothing is."""
    router = model.layers[0].key_router
    if not isinstance(router, ContextRouter):
        return None
    leaning = router.lean(pad_sequence(list(torch.split(ids, lengths)), batch_first=True))
    return torch.cat([row[:length] for row, length in zip(leaning, lengths, strict=True)])
