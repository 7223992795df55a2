"""Guilds with statistics: groups of experts that serve a kind of token, each with a card and a verdict.

A guild is a layer, a class of tokens, and the experts that the class chooses more often than chance allows. It is
*supported* if it passes every test, and each test is corrected for all that a run puts to it:

1. association: the layer's experts and the family's classes share more information than under shuffled labels
   (see association.py), corrected over all layers and families (Westfall and Young);
2. enrichment: its experts stand out at a false discovery rate of `level`, over all experts, classes and layers;
3. random keys: its layer tells the class apart better than the same queries do when random keys, equally loaded,
   stand in for the layer's own (the largest of all layers and classes in each draw);
4. knock-out: without its experts the class is hurt more than it would be by losing as much of its gates with random
   sets of experts that displace it as much, and by more than that holds for other tokens (labels shuffled; the largest
   of all guilds).

Tests 1, 3 and 4 are three ways to be wrong; each gets a third of `level`, so that the chance that a run reports any
false guild stays below `level`. All three p-values are ranks: no tail is assumed. Test 2 only says which experts belong
to a guild.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from some_moe.config import ConfigError
from some_moe.data.batches import Rows
from some_moe.glass.inspect.association import bootstrap_weights
from some_moe.glass.inspect.cards import Case, count_passed, fail_before_knock_out, find_cases, judge, quote_words
from some_moe.glass.inspect.collect import collect
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.communities import LARGE_LIBRARY, count_pairs, find_communities, measure_communities
from some_moe.glass.inspect.depth import bootstrap_depth, judge_depth
from some_moe.glass.inspect.evidence import Measured, Words, compare_keys, judge_association
from some_moe.glass.inspect.interventions import Probe, Replay, replay, route_by_chance
from some_moe.glass.inspect.labels import describe_labels, label_tokens
from some_moe.glass.inspect.trials import Trials, judge_knock_outs
from some_moe.training.runs import Run, load

LEVEL = 0.01  # the chance that a run reports any false guild
NUM_WAYS_TO_BE_WRONG = 3  # association, random keys, knock-out
NOTES = (
    "Information is counted by selection: each of a token's experts counts once, whatever its gate.",
    "Information is corrected by the mean of the shuffles, and divided by the entropy of the classes.",
    "Part of speech and form are shuffled between words of like frequency; role and plot part must also beat "
    "label sequences that are exchanged between stories; the place in a story is shuffled within words; identity and "
    "frequency are only described.",
    "Random keys meet the run's own queries, with a selection bias that makes the experts as evenly used as they are "
    "under its own keys. They are tried on the first stories: random_keys_nmi is to be compared with own_keys_nmi.",
    "A knock-out counts harm beyond displacement: nats that tokens lose with the guild, less what as much of their "
    "gates costs them with random sets, which displace the class as much as they can. Labels are shuffled by word, so "
    "that a class of two or three words has too few shuffles to pass.",
    "The communities' null keeps every expert's load, but not that a word's occurrences choose alike.",
    "Each of the three tests (association, random keys, knock-out) must pass at a third of the level, corrected for "
    "everything that was tested, by ranks alone.",
    "Intervals draw stories anew; what another training seed would give is not in them.",
)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is computed. The defaults suit two slow cores."""

    max_tokens: int = 20_000  # for association and communities
    key_tokens: int = 2_600  # replayed under random keys
    trial_tokens: int = 2_000  # replayed without experts
    num_shuffles: int = 999
    num_key_draws: int = 599  # a rank among them must reach a third of the level, with one of them beyond
    num_described_draws: int = 15  # of these information and communities are told too
    num_key_shuffles: int = 20  # for each of those
    num_sets: int = 10  # random sets for each knock-out
    num_exchanges: int = 2  # for each layer
    num_community_shuffles: int = 49
    num_bootstraps: int = 500
    fewest_knock_outs: int = 2  # where fewer candidates pass the other tests, some that failed are tried too


def analyze_guilds(
    run_path: Path,
    collection: Collection,
    *,
    control: Path | None = None,
    effort: Effort | None = None,
    device: str = "cpu",
    **branches: Any,
) -> dict[str, Any]:
    """Find and judge the guilds of a run: what guilds.json holds.

    collection: what collect() saw of this run. control: another run (such as one whose keys never moved) that is
    analysed in the same way on the same text; it must have the same tokenizer. branches: see `collect_run`.
    """
    step, effort = collection.meta["step"], effort or Effort()
    if not (Path(run_path) / "checkpoints" / f"step-{step}").exists():
        raise ConfigError(f"{str(run_path)!r} went on training and no longer has step {step}; analyse it again")
    run = _open(run_path, f"step-{step}", device, **branches)
    other = None if control is None else _open(control, "best", device)
    if other is not None and other.tokenizer.to_json() != run.tokenizer.to_json():
        raise ConfigError(f"the control {str(control)!r} has another tokenizer; give a run on the same data")
    result = {"of": collection.digest()} | Study(run, collection, LEVEL, 0, effort).report() | {"control": None}
    if other is not None:
        seen = collect(other, rows_of(collection), split=collection.meta["split"], max_tokens=len(collection.tokens))
        result["control"] = {"run": other.path.resolve().name, **Study(other, seen, LEVEL, 0, effort).report()}
    return result


def _open(path: Path, checkpoint: str, device: str, **branches: Any) -> Run:
    """A run whose model has experts, brought to a device."""
    run = load(path, checkpoint=checkpoint, **branches)
    if not run.model.layers:
        raise ConfigError(f"{str(path)!r} has no SoME layer, so it has no guilds; give a run with model.ffn: some")
    run.model.to(device)
    return run


def rows_of(collection: Collection) -> Rows:
    """The collected stories as rows of ids again."""
    ends = np.append(np.flatnonzero(collection.position == 0)[1:], len(collection.tokens))
    ids = np.insert(collection.tokens, ends, collection.targets[ends - 1]).astype(np.uint16)
    return Rows(ids, np.append(0, ends + np.arange(1, len(ends) + 1)))


def whole_stories(story: np.ndarray, most: int) -> int:
    """How many of the first tokens are whole stories and at most `most`; at least one story."""
    ends = np.flatnonzero(np.diff(story, append=-1)) + 1
    return int(max(ends[0], ends[ends <= most].max(initial=0)))


class Study:
    """One run's guilds, computed step by step in the order in which they are reported."""

    def __init__(self, run: Run, collection: Collection, level: float, seed: int, effort: Effort) -> None:
        self.run, self.level, self.effort = run, level, effort
        self.share = level / NUM_WAYS_TO_BE_WRONG
        self.random = np.random.default_rng(seed)
        self.split = collection.meta["split"]
        self.num_experts = run.config.model.num_experts
        self.has_keys = all(layer.state is not None for layer in run.model.layers)
        size = whole_stories(collection.story, effort.max_tokens)
        self.tokens, self.targets = collection.tokens[:size], collection.targets[:size]
        self.story, self.experts = collection.story[:size], collection.experts[:, :size]
        self.num_key_tokens = whole_stories(self.story, effort.key_tokens)
        self.families = label_tokens(self.tokens, self.story, run.tokenizer, run.config.data, self.split)

    def report(self) -> dict[str, Any]:
        """Everything that guilds.json holds of one run."""
        layers, effort = range(len(self.experts)), self.effort
        text = (self.families, self.tokens, self.story, self.experts, self.num_experts)
        words = Words(*text)
        chosen, shuffles = words.experts, effort.num_shuffles
        measured = [Measured(words, family, chosen, shuffles, self.random) for family in words.families]
        judge_association(measured)
        draws = self.draw_random_keys() if self.has_keys else []
        if draws:
            described = (effort.num_described_draws, effort.num_key_shuffles)
            compare_keys(Words(*text, self.num_key_tokens), draws, measured, *described)
        weights = bootstrap_weights(len(words.text.story_start), effort.num_bootstraps, self.random)
        depths = [bootstrap_depth(words, one, weights) for one in measured]
        trials = self.prepare_trials()
        cases = find_cases(measured, self.families, self.level, self.num_experts - self.run.config.model.top_k)
        self.knock_out(cases, trials, Words(*text, len(trials.probe.story)))
        return {
            "level": self.level,
            "split": self.split,
            "labels": describe_labels(self.families),
            "num_tokens": len(self.tokens),
            "families": [
                one.describe([depth.interval(layer, self.level)[1:] for layer in np.eye(len(layers))])
                for one, depth in zip(measured, depths, strict=True)
            ],
            "communities": self.find_communities(draws[: effort.num_described_draws]),
            "depth": judge_depth(depths, [one.p_adjusted for one in measured], self.level),
            "swap": [trials.exchange(layer, num_draws=effort.num_exchanges) for layer in layers],
            "guilds": [case.card | judge(case.card, self.share) | self.quote(case) for case in cases],
            "passed": count_passed([case.card for case in cases], self.share),
            "notes": list(NOTES),
        }

    def draw_random_keys(self) -> list[np.ndarray]:
        """Experts (L, n, K) of the first stories under R draws of random keys, each layer's queries as they are."""
        base = self.replay(self.num_key_tokens)[1]
        loads = [
            torch.from_numpy(np.bincount(one.ravel(), minlength=self.num_experts) / one.size) for one in base.experts
        ]
        chance = torch.Generator().manual_seed(int(self.random.integers(2**31)))
        layers = zip(self.run.model.layers, base.queries, loads, strict=True)
        found = [route_by_chance(*layer, self.effort.num_key_draws, chance) for layer in layers]
        return list(np.stack(found, 1))

    def replay(self, size: int) -> tuple[Probe, Replay]:
        """The first tokens as a probe, and what the model does with them."""
        probe = Probe(self.tokens[:size], self.targets[:size], self.story[:size])
        return probe, replay(self.run.model, probe, self.run.config)

    def prepare_trials(self) -> Trials:
        """The stories on which experts are taken away, and what the model does with all of them there."""
        size = whole_stories(self.story, self.effort.trial_tokens)
        probe, base = self.replay(size)
        same = np.sort(base.experts, -1) == np.sort(self.experts[:, :size], -1)
        if same.mean() < 0.9:
            raise ConfigError(
                f"the collection does not fit the model of {str(self.run.path)!r}: only {same.mean():.0%} of the "
                "experts agree; make it again with `some analyze RUN`"
            )
        return Trials(run=self.run, probe=probe, base=base, level=self.level, random=self.random)

    def find_communities(self, draws: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Communities of every layer; none where a token has one expert only."""
        if self.run.config.model.top_k == 1:
            return []
        draws = draws[:3] if self.num_experts >= LARGE_LIBRARY else draws
        found = []
        for layer, experts in enumerate(self.experts[:, : self.num_key_tokens].astype(np.int64)):
            one = measure_communities(experts, self.num_experts, self.effort.num_community_shuffles, self.random)
            by_chance = [find_communities(count_pairs(draw[layer], self.num_experts), 0)[1] for draw in draws]
            found.append({"layer": layer, **one, "random_keys_modularity": by_chance})
        return found

    def knock_out(self, cases: Sequence[Case], trials: Trials, words: Words) -> None:
        """Knock out every case that still stands, and a few others to be seen."""
        standing = [case for case in cases if fail_before_knock_out(case.card, self.share) is None]
        fallen = [case for case in cases if case not in standing] if self.has_keys else []
        tried = [*standing, *fallen[: max(0, self.effort.fewest_knock_outs - len(standing))]]
        for case in tried:
            case.card["knockout"] = trials.knock_out(case, num_sets=self.effort.num_sets)
        judge_knock_outs(tried, words, self.effort.num_shuffles, self.random)

    def quote(self, case: Case) -> dict[str, Any]:
        """Favourite words of a guild: tokens of its class that chose one of its experts."""
        served = np.isin(self.experts[case.card["layer"]], case.card["experts"]).any(-1)
        return quote_words(np.flatnonzero(served & case.inside), self.tokens, self.story, self.run.tokenizer)
