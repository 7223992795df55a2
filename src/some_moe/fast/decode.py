"""Generation on a GPU: a step of one token a row, captured once as a CUDA graph and replayed.

The captured step is the model's own forward pass on a cache of fixed room, the choice of the next token and all that it
remembers: the host launches one graph a token, and reads the token while the next one is made.

Shapes: B rows, T positions of the prompt, P positions that the cache has room for.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from some_moe.fast.experts import fits_graph
from some_moe.fast.model import FastLM
from some_moe.fast.static_cache import StaticCache
from some_moe.model.tokens import TokenInfo
from some_moe.sampling import Chooser
from some_moe.training.generation import decode_plainly

FEW_TOKENS = 8  # fewer are told before a capture has paid
ROOM = 128  # the cache grows by so many positions: attention reads all of them


class Decoder:
    """One generation: the prompt in one pass, then steps of one token a row."""

    def __init__(self, model: FastLM, prompt: Tensor, max_new_tokens: int, choose: Chooser) -> None:
        self.model, self.choose = model, choose
        room = -(-(prompt.shape[1] + max_new_tokens) // ROOM) * ROOM
        self.cache = StaticCache(room, prompt.device)
        self.info = TokenInfo.of((len(prompt), 1), prompt.device, sums=False)
        info = TokenInfo.of(prompt.shape, prompt.device, sums=False)
        self.casts = model.make_casts()
        self.token = choose(model(prompt, info, cache=self.cache).logits[:, -1], prompt)
        self.cache.clear()
        self.cache.position.fill_(self.cache.length)
        self.cache.steps = True

    def step(self) -> None:
        """Read the last token and choose the next."""
        fresh = self.token.clamp(min=0)[:, None]  # −1 is told when it is read, a step later
        with self.model.holding(self.casts):
            logits = self.model(fresh, self.info, cache=self.cache).logits[:, -1]
        chosen = self.choose(logits, fresh)
        self.cache.position += 1
        self.token.copy_(chosen)

    def capture(self) -> torch.cuda.CUDAGraph:
        """Capture a step, without doing it."""
        graph = torch.cuda.CUDAGraph()
        if self.choose.generator is not None:
            graph.register_generator_state(self.choose.generator)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step()
        return graph

    def tokens(self, count: int) -> Iterator[Tensor]:
        """So many tokens (B,), on the host. Each is read while the one behind it is made."""
        before = self.read()
        graph = None
        for number in range(1, count):
            if number == 1:
                self.step()  # an ordinary one: what is made on first use is there when it is captured
            else:
                graph = graph or self.capture()
                graph.replay()
            now = self.read()
            yield self.wait(before)
            before = now
        yield self.wait(before)

    def read(self) -> tuple[Tensor, torch.cuda.Event]:
        """The last token on its way to the host."""
        host = torch.empty(self.token.shape, dtype=self.token.dtype, pin_memory=True)
        host.copy_(self.token, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return host, event

    @staticmethod
    def wait(read: tuple[Tensor, torch.cuda.Event]) -> Tensor:
        host, event = read
        event.synchronize()
        return host


def decode(model: FastLM, prompt: Tensor, max_new_tokens: int, choose: Chooser) -> Iterator[Tensor]:
    """As `training.generation.decode_plainly`."""
    whole = all(fits_graph(library, model.dtype or torch.float32) for library in model.libraries)
    if max_new_tokens < FEW_TOKENS or not whole:
        return decode_plainly(model, prompt, max_new_tokens, choose)
    return Decoder(model, prompt, max_new_tokens, choose).tokens(max_new_tokens)
