"""What happens when experts are taken away, exchanged, or found by other keys: the model's own forward, altered.

An alteration lets other tensors stand in for some of the model's own while a `with` block lasts; nothing is
written to the model, and nothing of it is left behind. Shapes: N tokens, E experts, K experts a token, L layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.config import RunConfig
from some_moe.data.batches import Batch
from some_moe.data.tokenizer import PAD
from some_moe.model.layer import SomeLayer
from some_moe.model.router import KeyRouter
from some_moe.model.transformer import SomeLM, token_cross_entropy
from some_moe.precision import at_least_float32
from some_moe.training.evaluate import forward

StandIn = tuple[nn.Module, str, Tensor]  # owner, name of its parameter or buffer, what stands in for it
BIAS_ROUNDS, BIAS_TOKENS = 25, 1024  # for fitting a selection bias to a wanted load


@contextmanager
def stand_in(*changes: StandIn) -> Iterator[None]:
    """Let tensors stand in for a model's own, and put its own back at the end."""
    with ExitStack() as stack:
        for owner, name, tensor in changes:
            shelf: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
            stack.callback(shelf.__setitem__, name, shelf[name])
            shelf[name] = tensor
        yield


def knock_out(layer: SomeLayer, experts: Sequence[int]) -> StandIn:
    """Nobody can choose these experts: each token falls to its next best. Needs a layer with keys."""
    assert layer.state is not None
    num_left = layer.model.num_experts - len(set(experts))
    if num_left < layer.model.top_k:
        raise ValueError(f"{num_left} experts would be left, but each token needs {layer.model.top_k}; knock out fewer")
    bias = layer.state.bias.clone()
    bias[list(experts)] = -torch.inf
    return layer.state, "bias", bias


def exchange_experts(layer: SomeLayer, order: np.ndarray) -> list[StandIn]:
    """Expert order[i] sits at key i: the keys stay, the experts' weights move. order (E,): each of them once."""
    places = torch.as_tensor(order, device=layer.library.up.device)
    library = layer.library
    library.weights()  # of a base and its branches, all experts are joined now
    tensors = [*library.named_parameters(recurse=False), *library.named_buffers(recurse=False)]
    return [(library, name, tensor.detach()[places]) for name, tensor in tensors if len(tensor) == len(places)]


def fit_bias(scores: Tensor, loads: Tensor, top_k: int) -> Tensor:
    """A selection bias (E,) under which scores (N, E) give loads (E,), the busiest expert taking the largest.

    loads: wanted shares of the selections, in any order. The fit is approximate, and made on some of the tokens.
    """
    scores = scores[:: max(1, len(scores) // BIAS_TOKENS)]
    num_experts = scores.shape[1]
    bias = scores.new_zeros(num_experts)

    def count() -> Tensor:
        chosen = (scores + bias).topk(top_k, dim=-1).indices
        return torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()

    found = count() + 1e-6 * torch.rand(num_experts, generator=torch.Generator().manual_seed(0)).to(scores)
    wanted = torch.empty_like(found)
    wanted[found.argsort()] = loads.to(found).sort().values
    unused = wanted == 0
    if num_experts - int(unused.sum()) >= top_k:
        bias[unused] = -torch.inf
    floor = 1 / len(scores)
    scale = scores.std(-1).mean()
    for turn in range(BIAS_ROUNDS):
        error = ((wanted + floor) / (count() + floor)).log()
        bias += scale * 0.3 / (1 + turn / 10) * error.clamp(-2, 2)
    return bias


@contextmanager
def random_keys(model: SomeLM, loads: Sequence[Tensor], *, seed: int) -> Iterator[None]:
    """Every layer is found by fresh random unit keys.

    A selection bias, fitted to the tokens of each forward pass, makes the experts as evenly or unevenly used as
    loads (one (E,) a layer) say. Without it random keys would mostly differ in how few experts they use.
    """
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        for layer, load in zip(model.layers, loads, strict=True):
            state = layer.state
            assert state is not None
            assert layer.key_router is not None
            keys = F.normalize(torch.randn(state.keys.shape, generator=generator), dim=-1).to(state.keys)
            bias = torch.zeros_like(state.bias)
            changes: list[StandIn] = [(state, "keys", keys), (state, "bias", bias)]
            if state.smoothed is not None:
                changes.append((state, "smoothed", keys))
            stack.enter_context(stand_in(*changes))
            handle = layer.key_router.register_forward_pre_hook(partial(_fit_stand_in, bias, load))
            stack.callback(handle.remove)
        yield


def _fit_stand_in(bias: Tensor, load: Tensor, router: KeyRouter, arguments: tuple[Any, ...]) -> None:
    """Fit a bias that stands in to the queries that a router is about to see."""
    query, info, top_k = arguments
    raw, mean = at_least_float32(query), router.state.query_mean
    scores = router.score(raw if mean is None else raw - mean)
    bias.copy_(fit_bias(scores[info.counted], load, top_k))


class Probe:
    """Some whole stories as one batch, a story a row, small enough to be run many times."""

    def __init__(self, tokens: np.ndarray, targets: np.ndarray, story: np.ndarray) -> None:
        """tokens, targets and story (N,), in order."""
        starts = np.flatnonzero(np.diff(story, prepend=story[0] - 1))
        lengths = np.diff(starts, append=len(story))
        number = np.repeat(np.arange(len(starts)), lengths)
        place = np.arange(len(story)) - starts[number]
        inputs = torch.full((len(starts), int(lengths.max())), PAD)
        wanted, real = inputs.clone(), torch.zeros_like(inputs, dtype=torch.bool)
        inputs[number, place] = torch.from_numpy(tokens.astype(np.int64))
        wanted[number, place] = torch.from_numpy(targets.astype(np.int64))
        real[number, place] = True
        self.batch = Batch(inputs=inputs, targets=wanted, real=real, rows=torch.arange(len(starts)))
        self.story = number  # (N,) number of each token's story, from 0


class Replay(NamedTuple):
    """What one pass over a probe gave, in the order of its tokens."""

    nats: np.ndarray  # (N,) float64
    experts: np.ndarray  # (L, N, K) int64


@torch.no_grad()
def replay(model: SomeLM, probe: Probe, config: RunConfig) -> Replay:
    """Run the model, as it is altered at the moment, over a probe."""
    batch = probe.batch.to(model.head.weight.device)
    text_alone = config.override({"data.count_padding": False})  # loads are of real tokens, so random keys fit those
    output = forward(model, batch, text_alone, sums=False)
    nats = token_cross_entropy(output.logits, batch.targets)[batch.real].double().cpu().numpy()
    experts = [routing.experts[batch.real].cpu().numpy() for routing in output.routings if routing.experts is not None]
    return Replay(nats, np.stack(experts))
