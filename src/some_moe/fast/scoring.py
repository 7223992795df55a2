"""Evaluation within a run on a GPU: scoring a batch is captured once for each shape, and replayed.

An evaluation's passes are short, and Python takes ten times as long to launch one as the chip does to run it.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from some_moe.fast.model import FastLM
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo

EAGER_PASSES = 2  # of each shape before it is captured: a shape that comes once or twice is not worth it
MAX_CAPTURES = 16
FIELDS = ("counted", "rows", "salt", "ids", "positions", "segments")

Scores = tuple[Tensor, tuple[Routing, ...]]
Given = dict[str, Tensor]  # what a pass reads, by name


@dataclass(frozen=True)
class Capture:
    graph: torch.cuda.CUDAGraph
    given: Given
    scores: Scores


class GraphedScorer:
    """`model.score` of a model that is changed by writing into its tensors alone: a replay hears no hooks."""

    def __init__(self, model: FastLM) -> None:
        self.model = model
        self.seen: Counter[Any] = Counter()
        self.captures: dict[Any, Capture] = {}

    @torch.no_grad()
    def __call__(self, tokens: Tensor, targets: Tensor, info: TokenInfo) -> Scores:
        """Scores stay valid until the next call."""
        given = {"tokens": tokens, "targets": targets} | {
            name: value for name in FIELDS if (value := getattr(info, name)) is not None
        }
        kind = tuple((name, value.shape, value.dtype) for name, value in given.items()), info.sums, self.model.training
        self.seen[kind] += 1
        if kind not in self.captures:
            full = len(self.captures) >= MAX_CAPTURES
            if full or self.seen[kind] <= EAGER_PASSES:
                return self.model.score(tokens, targets, info)
            self.captures[kind] = self.capture(given, info)
        capture = self.captures[kind]
        for name, value in given.items():
            capture.given[name].copy_(value, non_blocking=True)
        capture.graph.replay()
        return capture.scores

    def capture(self, given: Given, info: TokenInfo) -> Capture:
        """Capture, without doing it, the scoring of copies of what is given."""
        static = {name: value.clone() for name, value in given.items()}
        changes: dict[str, Any] = {name: static[name] for name in FIELDS if name in static}
        known = replace(info, **changes)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.captures.values())).graph.pool() if self.captures else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            scores = self.model.score(static["tokens"], static["targets"], known)
        return Capture(graph, static, scores)
