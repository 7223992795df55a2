"""Replay a checkpoint over a split, and keep who did the work for every token. Keys stay still.

Shapes: L SoME layers, N real tokens, K experts a token, E experts, D model width, S sampled queries.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe.config import ConfigError
from some_moe.data.batches import Batch, Batches, Rows
from some_moe.data.dataset import prepare
from some_moe.data.sources import SPLITS
from some_moe.glass import MAX_TOKENS
from some_moe.glass.inspect.collection import Collection
from some_moe.hashing import make_salt, sample_order
from some_moe.model.layer import SomeLayer
from some_moe.model.routing import Routing, unit_vectors
from some_moe.model.tokens import TokenInfo
from some_moe.training.runs import Run, load

ROWS_A_BATCH = 16  # small batches: the logits of a wide vocabulary are large
NO_KEYS = "Hash routing has no keys and no queries; `usage` is the load of this pass."
NO_LAYERS = "This model is dense: it has no SoME layers, so there are no experts to watch."


def collect_run(
    path: str | Path,
    *,
    split: str = "valid",
    max_tokens: int = MAX_TOKENS,
    checkpoint: str = "best",
    device: torch.device | str = "cpu",
) -> Collection:
    """Open a run, replay one of its own splits, and save what was seen as RUN/analysis/collected.safetensors."""
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is not known; use one of {', '.join(SPLITS)}")
    run = load(path, checkpoint=checkpoint)
    dataset = prepare(run.config.data, run.config.model.vocab_size, run.tokenizer)
    collection = collect(run, getattr(dataset, split), split=split, max_tokens=max_tokens, device=device)
    collection.save(Path(path) / "analysis" / "collected.safetensors")
    return collection


@torch.no_grad()
def collect(
    run: Run, rows: Rows, *, split: str, max_tokens: int = MAX_TOKENS, device: torch.device | str = "cpu"
) -> Collection:
    """Replay whole stories from the split's start, up to max_tokens real tokens (but at least one story).

    Tokens come out story by story, in the split's order, however they were batched.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens {max_tokens} is too few; use 1 or more")
    if len(rows) == 0:
        raise ConfigError(f"the {split} split has no stories; choose another split")
    rows = _first_stories(rows, max_tokens)
    lengths = rows.lengths
    starts = np.concatenate(([0], np.cumsum(lengths)))  # where each story begins among the N tokens
    num_tokens = int(starts[-1])
    model = run.model.to(device)
    layers = model.layers
    num_experts = run.config.model.num_experts if layers else 0
    top_k = run.config.model.top_k if layers else 0
    sampled = _sample_tokens(rows, starts, max(512, 2 * run.config.model.d_model), run.config.train.seed)
    has_queries = bool(layers) and layers[0].state is not None
    width = run.config.model.d_model if has_queries else 0

    loss = np.zeros(num_tokens, np.float32)
    experts = np.zeros((len(layers), num_tokens, top_k), np.int16)
    gates = np.zeros((len(layers), num_tokens, top_k), np.float32)
    queries = np.zeros((len(layers), len(sampled), width), np.float32)
    sample_place = np.full(num_tokens, -1)  # of each token among the sampled, or -1
    sample_place[sampled] = np.arange(len(sampled))

    for batch, places in _batches(rows, run, starts):
        batch = batch.to(torch.device(device))
        tokens, real = batch.inputs, batch.real
        info = TokenInfo.of(tokens.shape, tokens.device, counted=real, rows=batch.rows, ids=tokens, sums=False)
        output = model(tokens, info)
        logits = output.logits[batch.real].float()
        loss[places] = F.cross_entropy(logits, batch.targets[batch.real], reduction="none").cpu().numpy()
        into = sample_place[places]
        wanted = into >= 0
        for number, (layer, routing) in enumerate(zip(layers, output.routings, strict=True)):
            chosen, weight = _strongest_first(routing, batch.real)
            experts[number, places], gates[number, places] = chosen, weight
            if width and wanted.any():
                queries[number, into[wanted]] = _unit_queries(layer, routing, batch.real)[wanted]

    story = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    return Collection(
        meta=_describe(run, split, num_experts, top_k, len(rows), num_tokens, float(loss.mean(dtype=np.float64))),
        tokens=np.concatenate([rows[i][:-1] for i in range(len(rows))]).astype(np.int32),
        targets=np.concatenate([rows[i][1:] for i in range(len(rows))]).astype(np.int32),
        story=story,
        position=(np.arange(num_tokens) - starts[story]).astype(np.int32),
        loss=loss,
        experts=experts,
        gates=gates,
        queries=queries,
        **_key_stores(layers, experts, num_experts),
    )


def _first_stories(rows: Rows, max_tokens: int) -> Rows:
    """As many whole stories as fit, and at least one."""
    count = max(1, int(np.searchsorted(np.cumsum(rows.lengths), max_tokens, side="right")))
    return Rows(rows.ids[: rows.starts[count]], rows.starts[: count + 1])


def _batches(rows: Rows, run: Run, starts: np.ndarray) -> Iterator[tuple[Batch, np.ndarray]]:
    """Batches of stories of like length, each with the places (in the split's order) of its real tokens."""
    # Only real tokens are looked at, so the rows of runs that count padding need no padding here either.
    data = run.config.data.override({"batching": "bucketed", "loss_on": "text", "count_padding": False})
    batches = Batches(rows, data, rows_a_step=min(ROWS_A_BATCH, data.batch_size), seed=0, keep_partial=True)
    for chosen in batches.plan(0, shuffle=False):
        yield batches.make(chosen), np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])


def _sample_tokens(rows: Rows, starts: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The tokens whose queries are kept: the first `size` in a hashed order of (story, position)."""
    order = sample_order(make_salt(seed, 0), 0, torch.arange(len(rows)), int(rows.lengths.max())).numpy()
    hashed = np.concatenate([order[i, :length] for i, length in enumerate(rows.lengths)])
    assert len(hashed) == starts[-1]
    return np.argsort(hashed, kind="stable")[:size]


def _strongest_first(routing: Routing, real: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Experts and gates (n, K) of the real tokens. The router's own order follows the biased scores."""
    assert routing.experts is not None
    assert routing.gates is not None
    gates, order = routing.gates[real].sort(dim=-1, descending=True, stable=True)
    return routing.experts[real].gather(-1, order).cpu().numpy(), gates.float().cpu().numpy()


def _unit_queries(layer: SomeLayer, routing: Routing, real: Tensor) -> np.ndarray:
    """The queries (n, D) of the real tokens as they meet the keys: centred where the model centres, unit length."""
    assert routing.query is not None
    assert layer.state is not None
    query = routing.query[real].float()
    if layer.state.query_mean is not None:
        query = query - layer.state.query_mean
    return np.asarray(unit_vectors(query).cpu().numpy())


def _key_stores(layers: list[SomeLayer], experts: np.ndarray, num_experts: int) -> dict[str, np.ndarray]:
    """Keys, usage and respawns of every layer; zero-width keys and the load of this pass where there are none."""
    states = [layer.state for layer in layers if layer.state is not None]
    if states:
        return {
            "keys": np.stack([state.routing_keys.detach().float().cpu().numpy() for state in states]),
            "usage": np.stack([state.usage.float().cpu().numpy() for state in states]),
            "respawns": np.stack([state.respawns.cpu().numpy() for state in states]),
        }
    counts = np.zeros((len(layers), num_experts), np.float32)
    for number, chosen in enumerate(experts):
        counts[number] = np.bincount(chosen.reshape(-1), minlength=num_experts)
    return {
        "keys": np.zeros((len(layers), num_experts, 0), np.float32),
        "usage": (counts * num_experts / counts.sum(1, keepdims=True)).astype(np.float32),
        "respawns": np.zeros((len(layers), num_experts), np.int64),
    }


def _describe(
    run: Run, split: str, num_experts: int, top_k: int, num_stories: int, num_tokens: int, mean_loss: float
) -> dict[str, Any]:
    """What a reader of the file needs to know besides the arrays."""
    layers, notes = run.model.layers, []
    if not layers:
        notes.append(NO_LAYERS)
    elif layers[0].state is None:
        notes.append(NO_KEYS)
    return {
        "run": run.config.name,
        "step": run.step,
        "split": split,
        "num_experts": num_experts,
        "top_k": top_k,
        "depths": [layer.layer for layer in layers],
        "stories": num_stories,
        "num_tokens": num_tokens,
        "loss": mean_loss,
        "router": run.config.model.router if layers else None,
        "center_queries": run.config.model.center_queries,
        "notes": notes,
    }
