"""The galaxy: keys of every layer on a plane that stays, and what is known of each expert. Needs no torch.

Shapes: L layers, E experts, D model width.
"""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from some_moe.config import ConfigError
from some_moe.glass.inspect.cards import quote_words
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.communities import count_pairs, find_communities
from some_moe.glass.inspect.labels import UNLABELLED, label_tokens
from some_moe.glass.inspect.movement import thin_out
from some_moe.glass.inspect.projections import principal_axes, project, unit_rows
from some_moe.live.plans import stamp_of
from some_moe.live.watched import Watched
from some_moe.system.files import inside
from some_moe.system.reading import LARGEST_TENSORS, clean, refuse_unreadable
from some_moe.training.run_folder import RunFolder

MOST_BYTES = 1 << 26  # of frames that are kept
MOST_POINTS = 1 << 18  # keys that a page can show
LARGE = 1_024  # experts a layer from which on communities take too long
FAR, TIMES = 0.6, 4.0  # a key that moved so far, and so many times farther than the layer's middle one, jumped
NUM_NEIGHBOURS = 6
LARGEST = 1e9  # a key's or a load's number beyond which it is damage
LOAD_POINTS = 120
MOST_KEPT = 4_000  # maps of layers, and loads of layers at a step
DAMAGED = "cannot be shown: it is damaged, or gone"


class Galaxy:
    """Frames of one run: for each snapshot x, y, usage and whether it jumped, of every key of every layer."""

    def __init__(self, run: Watched) -> None:
        self.run = run
        # What was made of snapshots, under their steps and when they were written: a resumed run writes them anew.
        self.axes: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, float]] = {}
        self.frames: OrderedDict[tuple[int, ...], bytes] = OrderedDict()
        self.loads: dict[tuple[int, ...], np.ndarray] = {}  # usage (E,) by step and layer
        self.lock = threading.Lock()

    def draw(self, step: int, fit: int) -> bytes:
        """float32 (L, E, 4) of the keys after `step` steps; fit: the snapshot that lays the map out with the first."""
        with self.lock:
            key = (step, fit, self._stamp(step), self._stamp(fit))
            if key not in self.frames:
                self.frames[key] = self._draw(step, fit)
                while len(self.frames) > 1 and sum(map(len, self.frames.values())) > MOST_BYTES:
                    self.frames.popitem(last=False)
            self.frames.move_to_end(key)
            return self.frames[key]

    def _draw(self, step: int, fit: int) -> bytes:
        model = self._model()
        if model.num_layers * model.num_experts > MOST_POINTS:
            raise ConfigError(f"{model.num_layers * model.num_experts:,} keys are more than the {MOST_POINTS:,} shown")
        frame = np.zeros((model.num_layers, model.num_experts, 4), np.float32)
        steps = self.run.snapshots
        before = steps[steps.index(step) - 1] if steps.index(step) else None
        for layer in range(model.num_layers):
            mean, axes, size = self._lay_out(fit, layer)
            keys = self.read("keys", step, layer)
            frame[layer, :, :2] = project(keys, mean, axes) / size
            frame[layer, :, 2] = self.read("usage", step, layer)
            if before is not None:
                frame[layer, :, 3] = find_jumps(self.read("keys", before, layer), keys)
        return np.nan_to_num(frame).astype("<f4").tobytes()

    def _lay_out(self, fit: int, layer: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Mean, axes and size of a layer's map: the plane of most variance of the first snapshot and of another."""
        key = (fit, layer, self._stamp(fit))
        if key not in self.axes:
            steps = dict.fromkeys((self.run.snapshots[0], fit))
            keys = np.concatenate([self.read("keys", step, layer) for step in steps])
            mean, axes, _ = principal_axes(keys)
            if len(self.axes) > MOST_KEPT:
                self.axes.clear()
            size = float(np.quantile(np.linalg.norm(project(keys, mean, axes), axis=1), 0.98))
            self.axes[key] = (mean, axes, max(size, 1e-6))
        return self.axes[key]

    def _model(self) -> Any:
        config = self.run.config
        if config is None or not self.run.summary.get("has_keys"):
            raise ConfigError(f"{self.run.shown} has no keys to show")
        return config.model

    def _file(self, step: int) -> Path:
        if self.run.from_checkpoints:
            return Path("checkpoints") / f"step-{step}" / "model.safetensors"
        return Path("keys") / f"step-{step}.safetensors"

    def _stamp(self, step: int) -> int:
        return stamp_of(self.run.path / self._file(step))

    def read(self, what: str, step: int, layer: int) -> np.ndarray:
        """The "keys" (E, D) or "usage" (E,) of a layer, from a snapshot or, where there is none, a checkpoint."""
        model = self._model()
        name = f"blocks.{layer}.ffn.key_router.state.{what}" if self.run.from_checkpoints else f"{layer}.{what}"
        wanted = (model.num_experts, model.d_model) if what == "keys" else (model.num_experts,)
        try:
            path = inside(self.run.path, self._file(step))
            refuse_unreadable(path, LARGEST_TENSORS)
            with safe_open(path, framework="numpy") as tensors:
                if tuple(tensors.get_slice(name).get_shape()) != wanted:
                    raise ConfigError(f"the snapshot of step {step} {DAMAGED}")
                found = np.asarray(tensors.get_tensor(name), np.float32)
        except (SafetensorError, OSError, TypeError):
            raise ConfigError(f"the snapshot of step {step} {DAMAGED}") from None
        if not (np.abs(found) < LARGEST).all():  # which nan is not, either
            raise ConfigError(f"the snapshot of step {step} {DAMAGED}")
        return found

    def describe(self, layer: int, expert: int, step: int) -> dict[str, Any]:
        """An expert's neighbours after `step` steps, and its load over time."""
        unit = unit_rows(self.read("keys", step, layer))
        near = unit @ unit[expert]
        order = [one for one in np.argsort(-near, kind="stable").tolist() if one != expert][:NUM_NEIGHBOURS]
        if len(self.loads) > MOST_KEPT:
            self.loads.clear()
        load = []
        for at in thin_out(np.array(self.run.snapshots), LOAD_POINTS).tolist():
            key = (at, layer, self._stamp(at))
            if key not in self.loads:
                try:
                    self.loads[key] = self.read("usage", at, layer)
                except ConfigError:
                    continue
            load.append([at, round(float(self.loads[key][expert]), 4)])
        return {"neighbours": [[one, round(float(near[one]), 4)] for one in order], "load": load}


def find_jumps(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Which keys (E, D) did not wander but were put elsewhere, as a respawn does: (E,) of 0 and 1."""
    moved = np.linalg.norm(unit_rows(after) - unit_rows(before), axis=1)
    return np.asarray((moved > FAR) & (moved > TIMES * np.median(moved)), np.float32)


class Insight:
    """What a replay over text showed of every expert: its words, its class of tokens, its community."""

    def __init__(self, run: Watched, seen: Collection) -> None:
        config = run.config
        if config is None:
            raise ConfigError(f"{run.shown} has no config.yaml that can be read; restore it")
        seen.refuse_other_model(config.model)
        self.seen, self.tokenizer = seen, RunFolder(run.path).read_tokenizer()
        if (seen.tokens >= self.tokenizer.vocab_size).any():
            raise ConfigError(f"what was collected of {run.shown} is of another tokenizer; analyse it anew")
        self.num_experts = config.model.num_experts
        family = label_tokens(seen.tokens, seen.story, self.tokenizer, config.data, seen.meta["split"])[0]
        self.family, self.classes, labels = family.name, [clean(one) for one in family.classes], family.labels
        self.kinds = [self._sort(chosen, labels) for chosen in seen.experts]
        self.communities, self.note = self._group(seen.experts)

    def _sort(self, chosen: np.ndarray, labels: np.ndarray) -> list[int]:
        """For each expert the class that it serves beyond that class's share of the text; -1 where it serves none."""
        known = labels != UNLABELLED
        table = np.zeros((self.num_experts, len(self.classes)))
        for column in chosen[known].T:
            np.add.at(table, (column, labels[known]), 1)
        served = table.sum(1)
        share = table.sum(0) / max(1, table.sum())
        excess = table / np.maximum(served, 1)[:, None] - share
        return [int(kind) if count >= 5 else -1 for kind, count in zip(excess.argmax(1), served, strict=True)]

    def _group(self, experts: np.ndarray) -> tuple[list[list[int]], str]:
        """Of each layer the number of each expert's community, -1 without one; and why there are none."""
        if self.num_experts > LARGE:
            return [], f"Communities are looked for among up to {LARGE:,} experts a layer."
        found = []
        try:
            for chosen in experts:
                place = [-1] * self.num_experts
                for number, group in enumerate(find_communities(count_pairs(chosen, self.num_experts), seed=0)[0]):
                    for expert in group:
                        place[expert] = number
                found.append(place)
        except ImportError:
            return [], "Communities need networkx; run pip install networkx."
        return found, ""

    def to_dict(self) -> dict[str, Any]:
        meta = self.seen.meta
        about = {"step": meta["step"], "tokens": meta["num_tokens"], "split": clean(meta["split"]), "note": self.note}
        kinds = {"family": self.family, "classes": self.classes, "kinds": self.kinds}
        return about | kinds | {"communities": self.communities}

    def quote(self, layer: int, expert: int) -> dict[str, Any]:
        """An expert's favourite words, and where they stand."""
        chosen = np.flatnonzero((self.seen.experts[layer] == expert).any(1) & (self.seen.position > 0))
        quoted = quote_words(chosen, self.seen.tokens, self.seen.story, self.tokenizer)
        return dict(clean(quoted)) | {"served": len(chosen), "of": int((self.seen.position > 0).sum())}


def read_insight(run: Watched) -> Insight | None:
    """What `some analyze` collected; None where it did not."""
    path = inside(run.path, "analysis/collected.safetensors")
    return Insight(run, Collection.load(path)) if path.is_file() else None
