"""One trained run as a record: its guilds, depth, clusters, centres and pruning, without any text of it."""

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np

from some_moe.config import ConfigError
from some_moe.glass.inspect.collect import collect_run
from some_moe.glass.inspect.guilds import Effort, analyze_guilds, whole_stories
from some_moe.glass.inspect.movement import trace_movement
from some_moe.glass.inspect.runs import read_run
from some_moe.training.runs import load
from tools.guilds_study import figures

FORMAT = 1
GUILD = ("class", "family", "layer", "experts", "npmi", "p_association", "verdict", "reason")
KNOCKOUT = ("class_change", "other_change", "random_class_change", "random_other_change", "effect", "interval",
            "p_adjusted", "class_displaced", "random_class_displaced")  # fmt: skip


def make_record(
    path: Path, *, data: str | None = None, device: str = "cpu", max_tokens: int = 20_000, effort: Effort | None = None
) -> dict[str, Any]:
    """Replay a run on its validation split, or on other text, and measure all that the study asks. See FORMAT."""
    began, about = time.monotonic(), read_run(path)
    seen = collect_run(path, data=data, max_tokens=max_tokens, device=device)
    if not seen.keys.size:
        raise ConfigError(f"{str(path)!r} has no keys; give a run that is routed by them")
    found = analyze_guilds(path, seen, device=device, effort=effort)
    run, random = load(path, checkpoint=f"step-{seen.meta['step']}"), np.random.default_rng(0)
    run.model.to(device)
    num_experts = seen.meta["num_experts"]
    loads = np.stack([np.bincount(one.ravel(), minlength=num_experts) for one in seen.experts])
    config, result = about.config, about.result or {}
    record = {
        "format": FORMAT,
        "run": about.name,
        "experiment": config.experiment,
        "keys": "gravity" if moves(config.gravity) else "still",
        "seed": config.train.seed,
        "commit": about.env.get("commit"),
        "trained_on": about.env.get("device"),
        "result": {name: result.get(name) for name in ("steps", "tokens", "val_loss", "test_loss", "middle_layer")},
        "text": {
            "name": found["split"],
            "num_tokens": found["num_tokens"],
            "digest": hashlib.sha256(seen.tokens.tobytes()).hexdigest(),
            "loss": seen.meta["loss"],
        },
        "num_layers": len(seen.experts),
        "num_experts": num_experts,
        "labels": found["labels"],
        "level": found["level"],
        "passed": found["passed"],
        "guilds": [slim(guild) for guild in found["guilds"] if guild["verdict"] == "supported" or is_noun(guild)],
        "families": {one["family"]: slim_family(one) for one in found["families"]},
        "depth": found["depth"],
        "communities": [
            {name: one[name] for name in ("layer", "modularity", "null_mean", "p_value")}
            for one in found["communities"]
        ],
        "swap": found["swap"],
        "clusters": figures.measure_clusters(seen.keys, random),
        "drift": figures.correlate_drift(loads, trace_movement(about.snapshots), random),
        "pruning": figures.prune(run, seen, whole_stories(seen.story, min(max_tokens, figures.PRUNE_TOKENS)), random),
    }
    return record | {"seconds": round(time.monotonic() - began, 1)}


def moves(gravity: Any) -> bool:
    """Whether any rule of gravity moves the keys."""
    rules = (("use_alpha", "alpha"), ("use_beta", "beta"), ("use_delta", "delta"))
    return any(getattr(gravity, switch) and getattr(gravity, strength) for switch, strength in rules)


def is_noun(guild: dict[str, Any]) -> bool:
    return bool(guild["family"] == "part of speech" and guild["class"] == "noun")


def slim(guild: dict[str, Any]) -> dict[str, Any]:
    """A guild without its words and where they stand."""
    knockout, keys = guild["knockout"], guild["random_keys"]
    bits = {"own_bits": keys["own_bits"], "random_bits": float(np.mean(keys["random_bits"] or [0]))}
    return {name: guild[name] for name in GUILD} | {
        "random_keys": bits | {"p_adjusted": keys["p_adjusted"]},
        "knockout": knockout and {name: knockout.get(name) for name in KNOCKOUT},
    }


def slim_family(family: dict[str, Any]) -> dict[str, Any]:
    """What experts tell about a family, by layer."""
    layers = family["layers"]
    return {
        "nmi": [one["nmi"] for one in layers],
        "interval": [one["interval"] for one in layers],
        "p_adjusted": [one["p_adjusted"] for one in layers],
        "own_keys_nmi": [one["own_keys_nmi"] for one in layers],
        "random_keys_nmi": [float(np.mean(one["random_keys_nmi"])) for one in layers if one["random_keys_nmi"]],
    }
