"""What one pass of a model over a split showed, as one small file that can be drawn anywhere.

Shapes: L SoME layers, N real tokens, K experts a token, E experts, D model width, S sampled queries.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from some_moe.config import ConfigError, ModelConfig
from some_moe.glass.inspect.forms import COLLECTED
from some_moe.system.files import write_whole
from some_moe.system.forms import MisfitError, parse
from some_moe.system.reading import read_tensors

CURE = "make it anew with `some analyze RUN`"
ARRAYS = {  # the axes and the type of each
    "tokens": ("N", np.int32), "targets": ("N", np.int32), "story": ("N", np.int32), "position": ("N", np.int32),
    "loss": ("N", np.float32), "experts": ("LNK", np.int16), "gates": ("LNK", np.float32),
    "keys": ("LED", np.float32), "usage": ("LE", np.float32), "respawns": ("LE", np.int64),
    "queries": ("LSD", np.float32),
}  # fmt: skip
SIGNED = ("loss", "gates", "keys", "queries")  # a loss of nothing may round below it


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
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ARRAYS}
        write_whole(path, save(arrays, metadata={"meta": json.dumps(self.meta)}))

    @classmethod
    def load(cls, path: Path) -> "Collection":
        if not path.is_file():
            raise ConfigError(f"{str(path)!r} is not there; make it with `some analyze RUN`")
        arrays, about = read_tensors(path)
        try:
            meta = parse(about.get("meta", ""), COLLECTED)
            refuse_misfit(meta, arrays)
        except MisfitError as error:
            raise ConfigError(f"{str(path)!r} {error}; {CURE}") from None
        return cls(meta=meta, **{name: arrays[name] for name in ARRAYS})

    def refuse_other_model(self, model: ModelConfig) -> None:
        """Refuse what was not seen of such a model: its sizes bound what is computed from it."""
        sizes = [self.meta["num_experts"], self.meta["top_k"], len(self.meta["depths"])]
        if sizes != ([model.num_experts, model.top_k, model.num_layers] if model.ffn == "some" else [0, 0, 0]):
            raise ConfigError(f"what was collected of {self.meta['run']!r} is of another model; {CURE}")

    def digest(self) -> str:
        """A hash of all that was seen: what is computed from it is of this collection, wherever both are copied."""
        found = hashlib.sha256(json.dumps(self.meta, sort_keys=True).encode())
        for name in ARRAYS:
            found.update(getattr(self, name).tobytes())
        return found.hexdigest()


def refuse_misfit(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Refuse what is missing, not finite, of another type or size than the rest asks for, or out of range."""
    sizes = {"L": len(meta["depths"]), "N": meta["num_tokens"], "E": meta["num_experts"], "K": meta["top_k"]}
    for name, (axes, dtype) in ARRAYS.items():
        array = arrays.get(name, np.empty(0))
        fits = array.dtype == dtype and array.ndim == len(axes)
        fits = fits and all(sizes.setdefault(axis, size) == size for axis, size in zip(axes, array.shape, strict=True))
        fits = fits and bool(np.isfinite(array).all()) and (name in SIGNED or not (array < 0).any())
        if not fits:
            raise MisfitError(f"does not fit at {name!r}")
    experts, story, position, num_experts = arrays["experts"], arrays["story"], arrays["position"], sizes["E"]
    begins = np.diff(story, prepend=-1)
    in_order = np.isin(begins, (0, 1)).all() and (position[begins == 1] == 0).all()
    in_range = {
        "tokens": sizes["N"] > 0,
        "loss": (arrays["loss"] > -1e-3).all(),
        "experts": (experts < num_experts).all() and num_experts >= sizes["K"] >= bool(len(experts)),
        "story": in_order and (np.diff(position)[begins[1:] == 0] == 1).all(),
    }
    for name, holds in in_range.items():
        if not holds:
            raise MisfitError(f"does not fit at {name!r}")
