"""What happens when experts are taken away, exchanged, or found by other keys.

An alteration lets other tensors stand in for some of the model's own while a `with` block lasts; nothing is
written to the model, and nothing of it is left behind. Shapes: N tokens, E experts, K experts a token, L layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.config import RunConfig
from some_moe.data.batches import Batch
from some_moe.data.tokenizer import PAD
from some_moe.model.layer import SomeLayer
from some_moe.model.transformer import SomeLM, token_cross_entropy
from some_moe.precision import at_least_float32
from some_moe.training.evaluate import forward

StandIn = tuple[nn.Module, str, Tensor]  # owner, name of its parameter or buffer, what stands in for it
BIAS_ROUNDS, BIAS_TOKENS = 15, 512  # for fitting a selection bias to a wanted load
KEYS_AT_ONCE = 2048


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
    """Selection biases (R, E) under which scores (R, N, E) give loads (E,), the busiest expert taking the largest.

    loads: wanted shares of the selections, in any order. The fit is approximate, and made on some of the tokens.
    """
    scores = scores[:, :: max(1, scores.shape[1] // BIAS_TOKENS)]
    num_draws, num_tokens, num_experts = scores.shape
    bias, one = scores.new_zeros(num_draws, num_experts), scores.new_ones(num_draws, num_tokens * top_k)

    def count() -> Tensor:
        chosen = (scores + bias[:, None]).topk(top_k, dim=-1, sorted=False).indices.flatten(1)
        return torch.zeros_like(bias).scatter_add_(1, chosen, one) / chosen.shape[1]

    found = count() + 1e-6 * torch.rand(num_experts, generator=torch.Generator().manual_seed(0)).to(scores)
    wanted = torch.empty_like(found).scatter_(1, found.argsort(), loads.to(found).sort().values.expand_as(found))
    if int((loads > 0).sum()) >= top_k:
        bias[wanted == 0] = -torch.inf
    scale = scores.std(-1).mean(1, keepdim=True)
    for turn in range(BIAS_ROUNDS):
        error = ((wanted + 1 / num_tokens) / (count() + 1 / num_tokens)).log()
        bias += scale * 0.3 / (1 + turn / 10) * error.clamp(-2, 2)
    return bias


@torch.no_grad()
def route_by_chance(
    layer: SomeLayer, queries: Tensor, load: Tensor, num_draws: int, generator: torch.Generator
) -> np.ndarray:
    """The experts (R, n, K) int16 that a layer's own queries (n, D), centred, find under R draws of random unit keys.

    A fitted selection bias makes the experts as evenly or unevenly used as `load` (E,) says. Without it random keys
    would mostly differ in how few experts they use.
    """
    router, state = layer.key_router, layer.state
    assert router is not None
    assert state is not None
    top_k, (num_experts, width) = layer.model.top_k, state.keys.shape
    names = ("keys",) if state.smoothed is None else ("keys", "smoothed")
    found = []
    at_once = max(1, KEYS_AT_ONCE // num_experts)
    for start in range(0, num_draws, at_once):
        size = min(at_once, num_draws - start) * num_experts
        keys = F.normalize(torch.randn(size, width, generator=generator), dim=-1).to(state.keys)
        with stand_in(*((state, name, keys) for name in names)):
            scores = router.score(queries).view(len(queries), -1, num_experts).transpose(0, 1)  # (draws, n, E)
        biased = scores + fit_bias(scores, load, top_k)[:, None]
        found.append(router.select(biased, top_k).cpu().numpy().astype(np.int16))
    return np.concatenate(found)


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
    gates: np.ndarray  # (L, N, K)
    queries: list[Tensor]  # (N, D) a layer, centred as they meet its keys; none under hash routing


@torch.no_grad()
def replay(model: SomeLM, probe: Probe, config: RunConfig) -> Replay:
    """Run the model, as it is altered at the moment, over a probe."""
    batch = probe.batch.to(model.head.weight.device)
    text_alone = config.override({"data.count_padding": False})  # loads are of real tokens, so random keys fit those
    output = forward(model, batch, text_alone, sums=False)
    nats = token_cross_entropy(output.logits, batch.targets)[batch.real].double().cpu().numpy()
    experts, gates, queries = [], [], []
    for layer, routing in zip(model.layers, output.routings, strict=True):
        assert routing.experts is not None
        assert routing.gates is not None
        experts.append(routing.experts[batch.real].cpu().numpy())
        gates.append(routing.gates[batch.real].float().cpu().numpy())
        if layer.state is not None and routing.query is not None:
            raw, mean = at_least_float32(routing.query[batch.real]), layer.state.query_mean
            queries.append(raw if mean is None else raw - mean)
    return Replay(nats, np.stack(experts), np.stack(gates), queries)
