"""Everything that analysis found in one run: the numbers behind the figures, as one object and as analysis.json."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from some_moe.glass.inspect.branches import measure_branches
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.communities import count_pairs
from some_moe.glass.inspect.forms import VERSION
from some_moe.glass.inspect.layers import RULES, LayerNumbers, measure_layers, share_company, strongest_pairs
from some_moe.glass.inspect.movement import LayerMovement, trace_movement
from some_moe.glass.inspect.projections import KeyMap
from some_moe.glass.inspect.runs import RunRecord
from some_moe.training.run_folder import RunFolder

MOST_LISTED_EXPERTS = 64  # matrices of more would make the file unreadable; the collection still holds them


@dataclass(frozen=True, kw_only=True)
class Findings:
    """One run, looked into. Without a collection only what the folder itself tells is there."""

    run: RunRecord
    collection: Collection | None
    layers: Sequence[LayerNumbers]  # empty without a collection, and for dense models
    movements: Sequence[LayerMovement]  # empty with fewer than two snapshots
    maps: dict[str, list[KeyMap]] = field(default_factory=dict)  # by method, one a layer; added as they are made
    branches: Sequence[dict[str, Any]] = ()  # of a run that has any: who serves what

    @property
    def has_keys(self) -> bool:
        """Whether the collection holds key stores that can be mapped."""
        return self.collection is not None and self.collection.keys.size > 0

    @property
    def missing(self) -> list[str]:
        """What is not there, and what follows from it."""
        notes = [] if self.collection is None else self.collection.meta["notes"]
        return list(dict.fromkeys([*self.run.missing, *notes]))

    def to_dict(self) -> dict[str, Any]:
        """What analysis.json holds."""
        run, losses = self.run, ["step", "tokens", "nats"]
        seen, newest = {} if self.collection is None else self.collection.meta, max(run.checkpoints, default=None)
        train = [[line["step"], line.get("tokens"), line["train_loss"]] for line in run.steps]
        valid = [[line["step"], line.get("tokens"), line["val_loss"]] for line in run.evaluations]
        usage = [
            [line["step"], *([layer[name] for layer in line["layers"]] for name in ("gini", "entropy_bits"))]
            for line in run.evaluations
            if line.get("layers")
        ]
        return {
            "format_version": VERSION,
            "run": run.name,
            "status": run.status,
            "last_step": run.last_step,
            # The checkpoint that was replayed, and the newest one then: whether this is old, it tells itself.
            "of": {name: seen.get(name) for name in ("step", "state")} | {"newest": seen.get("newest", newest)},
            "collected": None if self.collection is None else self.collection.meta,
            "rules": RULES,
            "layers": [layer.to_dict() | self._describe_company(place) for place, layer in enumerate(self.layers)],
            "key_maps": {
                method: [{"points": one.points.tolist(), "note": one.note} for one in maps]
                for method, maps in self.maps.items()
            },
            "branches": list(self.branches) or None,
            "movement": [movement.to_dict() for movement in self.movements],
            "curves": {
                "train_loss": {"columns": losses, "rows": train},
                "val_loss": {"columns": losses, "rows": valid},
                "usage": {"columns": ["step", "gini by layer", "entropy bits by layer"], "rows": usage},
            },
            "missing": self.missing,
        }

    def _describe_company(self, place: int) -> dict[str, Any]:
        assert self.collection is not None
        num_experts = self.collection.meta["num_experts"]
        pairs = count_pairs(self.collection.experts[place], num_experts)
        listed = num_experts <= MOST_LISTED_EXPERTS
        return {
            "strongest_pairs": strongest_pairs(pairs, len(self.collection.tokens)),
            "co_selection": share_company(pairs).round(6).tolist() if listed else None,
        }


def look_inside(run: RunRecord, collection: Collection | None) -> Findings:
    """Measure what can be measured; maps of the keys are added to `maps` by whoever makes them."""
    branches: Sequence[dict[str, Any]] = ()
    if run.grown is not None and collection is not None:
        branches = measure_branches(run.grown, collection, RunFolder(run.path).read_tokenizer())
    return Findings(
        run=run,
        collection=collection,
        layers=[] if collection is None else measure_layers(collection),
        movements=trace_movement(run.snapshots),
        branches=branches,
    )
