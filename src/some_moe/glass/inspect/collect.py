"""Replay a checkpoint over a split, and keep who did the work for every token. Keys stay still.

Shapes: L SoME layers, N real tokens, K experts a token, E experts, D model width, S sampled queries.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from some_moe.config import ConfigError
from some_moe.data.batches import Batches, Rows, encode_rows
from some_moe.data.sources import SPLITS, read_texts
from some_moe.glass import FILE, MAX_TOKENS
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.runs import hash_state
from some_moe.glass.inspect.traces import sort_by_gate
from some_moe.hashing import make_salt, sample_order
from some_moe.model.layer import SomeLayer
from some_moe.model.routing import unit_vectors
from some_moe.model.transformer import token_cross_entropy
from some_moe.training.evaluate import forward
from some_moe.training.run_folder import list_steps
from some_moe.training.runs import Run, load

SIGNS_A_TOKEN = 20  # more than any text has
ROWS_A_BATCH = 16  # small batches: the logits of a wide vocabulary are large
NO_KEYS = "Hash routing has no keys and no queries; `usage` is the load of this pass."
NO_LAYERS = "This model is dense: it has no SoME layers, so there are no experts to watch."


def collect_run(
    path: str | Path,
    *,
    split: str = "valid",
    data: str | Path | None = None,
    max_tokens: int = MAX_TOKENS,
    checkpoint: str = "best",
    device: torch.device | str = "cpu",
    **branches: Any,
) -> Collection:
    """Open a run, and replay one of its own splits, or all text of `data`: a file, a folder, or hf:OWNER/NAME.

    branches: base and favour of a run that has any, as `load` takes them.
    """
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is not known; use one of {', '.join(SPLITS)}")
    run = load(path, checkpoint=checkpoint, **branches)
    run.model  # noqa: B018 - one that does not fit is refused before its text is read, which may take long
    if data is None:
        rows = getattr(run.read_data(), split)
    else:
        texts = _take_beginning(read_texts(data, run.config.data), SIGNS_A_TOKEN * max_tokens)
        rows = encode_rows(texts, run.tokenizer, run.config.data.seq_len, split=True)
        split = FILE + Path(data).name
    seen = collect(run, rows, split=split, max_tokens=max_tokens, device=device)
    seen.meta["state"] = hash_state(run.checkpoint)
    seen.meta["favour"] = branches.get("favour")
    seen.meta["newest"] = max(list_steps(run.path / "checkpoints"))
    return seen


def _take_beginning(texts: Iterable[str], num_signs: int) -> Iterator[str]:
    """The first texts that have so many signs: no more is encoded than will be replayed, or a little."""
    for text in texts:
        yield text
        num_signs -= len(text)
        if num_signs <= 0:
            return


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
    count = max(1, int(np.searchsorted(np.cumsum(rows.lengths), max_tokens, side="right")))
    rows = Rows(rows.ids[: rows.starts[count]], rows.starts[: count + 1])
    starts = np.concatenate(([0], np.cumsum(rows.lengths)))  # where each story begins among the N tokens
    num_tokens = int(starts[-1])
    # Only real tokens are looked at, so the rows of runs that count padding need no padding here either.
    config = run.config.override({"data.batching": "bucketed", "data.loss_on": "text", "data.count_padding": False})
    model, layers = run.model.to(device), run.model.layers
    num_experts, top_k = (config.model.num_experts, config.model.top_k) if layers else (0, 0)
    width = config.model.d_model if layers and layers[0].state is not None else 0
    # The queries of some tokens are kept: of the first in a hashed order of (story, position).
    order = sample_order(make_salt(config.train.seed, 0), 0, torch.arange(len(rows)), int(rows.lengths.max())).numpy()
    hashed = np.concatenate([order[i, :length] for i, length in enumerate(rows.lengths)])
    sampled = np.argsort(hashed, kind="stable")[: max(512, 2 * config.model.d_model)]
    sample_place = np.full(num_tokens, -1)  # of each token among the sampled, or -1
    sample_place[sampled] = np.arange(len(sampled))

    loss = np.zeros(num_tokens, np.float32)
    experts = np.zeros((len(layers), num_tokens, top_k), np.int16)
    gates = np.zeros((len(layers), num_tokens, top_k), np.float32)
    queries = np.zeros((len(layers), len(sampled), width), np.float32)
    rows_a_step = min(ROWS_A_BATCH, config.data.batch_size)
    batches = Batches(rows, config.data, rows_a_step=rows_a_step, seed=0, keep_partial=True)
    for chosen in batches.plan(0, shuffle=False):
        batch = batches.make(chosen).to(torch.device(device))
        places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])  # of the batch's real tokens
        output = forward(model, batch, config, sums=False)
        loss[places] = token_cross_entropy(output.logits, batch.targets)[batch.real].cpu().numpy()
        wanted = sample_place[places] >= 0
        for number, (layer, routing) in enumerate(zip(layers, output.routings, strict=True)):
            assert routing.experts is not None
            assert routing.gates is not None
            experts[number, places] = routing.experts[batch.real].cpu().numpy()
            gates[number, places] = routing.gates[batch.real].float().cpu().numpy()
            if layer.state is not None and routing.query is not None:
                # As it meets the keys: centred where the model centres, at unit length.
                query, mean = routing.query[batch.real].float(), layer.state.query_mean
                unit = unit_vectors(query if mean is None else query - mean).cpu().numpy()
                queries[number, sample_place[places][wanted]] = unit[wanted]

    experts, gates = sort_by_gate(experts, gates)  # the router's own order follows the biased scores
    story = np.repeat(np.arange(len(rows), dtype=np.int32), rows.lengths)
    return Collection(
        meta={
            "run": config.name,
            "step": run.step,
            "split": split,
            "num_experts": num_experts,
            "top_k": top_k,
            "depths": [layer.layer for layer in layers],
            "stories": len(rows),
            "num_tokens": num_tokens,
            "loss": float(loss.mean(dtype=np.float64)),
            "router": config.model.router if layers else None,
            "center_queries": config.model.center_queries,
            "notes": [] if width else [NO_KEYS if layers else NO_LAYERS],
        },
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


def _key_stores(layers: list[SomeLayer], experts: np.ndarray, num_experts: int) -> dict[str, np.ndarray]:
    """Keys, usage and respawns of every layer; zero-width keys and the load of this pass where there are none."""
    states = [layer.state for layer in layers if layer.state is not None]
    if states:
        return {
            "keys": np.stack([state.routing_keys.detach().float().cpu().numpy() for state in states]),
            "usage": np.stack([state.usage.float().cpu().numpy() for state in states]),
            "respawns": np.stack([state.respawns.cpu().numpy() for state in states]),
        }
    loads = [np.bincount(chosen.ravel(), minlength=num_experts) for chosen in experts]
    counts = np.array(loads, np.float32).reshape(len(layers), num_experts)
    return {
        "keys": np.zeros((len(layers), num_experts, 0), np.float32),
        "usage": (counts * num_experts / counts.sum(1, keepdims=True)).astype(np.float32),
        "respawns": np.zeros((len(layers), num_experts), np.int64),
    }
