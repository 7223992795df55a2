"""What one pass of a model over a split showed, as one small file that can be drawn anywhere.

Shapes: L SoME layers, N real tokens, K experts a token, E experts, D model width, S sampled queries.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from some_moe.config import ConfigError
from some_moe.files import write_beside


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Every scored token with its experts, and the key stores they were found in."""

    meta: dict[str, Any]  # run, step, split, num_experts, top_k, depths (the block of each layer), stories, …
    tokens: np.ndarray  # (N,) int32: the input id at each position
    targets: np.ndarray  # (N,) int32: the id that was to be predicted there
    story: np.ndarray  # (N,) int32: number of the story within the split
    position: np.ndarray  # (N,) int32: place of the token within its row; 0 is bos
    loss: np.ndarray  # (N,) float32: nats of predicting the target
    experts: np.ndarray  # (L, N, K) int16, strongest gate first
    gates: np.ndarray  # (L, N, K) float32
    keys: np.ndarray  # (L, E, D) float32
    usage: np.ndarray  # (L, E) float32: gravity's running share of the load times E
    respawns: np.ndarray  # (L, E) int64
    queries: np.ndarray  # (L, S, D) float32: unit queries of the first S tokens of a hashed order

    def save(self, path: Path) -> None:
        """Write the file whole, or not at all."""
        arrays = {f.name: np.ascontiguousarray(getattr(self, f.name)) for f in fields(self) if f.name != "meta"}
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_beside(path) as scratch:
            save_file(arrays, scratch, metadata={"meta": json.dumps(self.meta)})

    @classmethod
    def load(cls, path: Path) -> "Collection":
        if not path.is_file():
            raise ConfigError(f"{str(path)!r} is not there; make it with `some analyze RUN`")
        with safe_open(path, framework="numpy") as file:
            meta = json.loads(file.metadata()["meta"])
            return cls(meta=meta, **{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
