"""A guild's card: who belongs to it, its favourite words in context, its figures, and the verdict on it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from some_moe.data.tokenizer import Tokenizer
from some_moe.glass.inspect.association import normalized_pmi
from some_moe.glass.inspect.evidence import Measured, rate_enrichment
from some_moe.glass.inspect.labels import Family

NUM_WORDS, NUM_CONTEXTS, CONTEXT_TOKENS = 8, 4, 8


@dataclass(kw_only=True, eq=False)
class Case:
    """A guild that is to be judged, with everything that is known for and against it."""

    family: Family
    label: int  # place of the class among the family's
    layer: int
    experts: tuple[int, ...]  # the most enriched first
    npmi: float  # highest among its experts
    q_value: float  # largest among its experts
    p_association: float  # corrected for all layers and families
    p_keys: float | None  # corrected for all layers and classes; None where there are no keys
    own_bits: float | None  # what the layer tells about the class, and what it tells under random keys
    random_bits: list[float]
    knockout: dict[str, Any] | None = None  # None where it was not tried

    @property
    def class_name(self) -> str:
        return self.family.classes[self.label]

    def judge(self, share: float) -> tuple[str, str]:
        """The verdict, with its reason in one sentence. share: the level of each test."""
        failure = self.failure_before_knock_out(share) or self.failure_of_knock_out(share)
        if failure:
            return "not supported", failure
        assert self.knockout is not None
        return "supported", (
            f"Its experts stand out beyond chance and beyond random keys, and without them {self.class_name} tokens "
            f"lose {self.knockout['class_change']:.3f} nats, other tokens {self.knockout['other_change']:.3f}."
        )

    def failure_before_knock_out(self, share: float) -> str | None:
        """Why the candidate fails before any expert is taken away; None where it does not."""
        if self.p_association > share:
            return (
                f"Shuffled labels may share as much: layer {self.layer} and {self.family.name} have "
                f"{_compare(self.p_association, share)}."
            )
        if self.p_keys is None or self.own_bits is None:
            return "The router has no keys, so neither random keys nor a knock-out can be tried."
        if self.p_keys > share:
            return (
                f"Random keys may do as well: layer {self.layer} tells {self.own_bits:.4f} bits about "
                f"{self.class_name}, with random keys {np.mean(self.random_bits):.4f} ({_compare(self.p_keys, share)})."
            )
        return None

    def failure_of_knock_out(self, share: float) -> str | None:
        """Why the knock-out does not speak for the candidate; None where it does."""
        found = self.knockout
        if found is None:
            return "It cannot be knocked out: its class is too rare, or too few other experts would be left to compare."
        hurt, other, by_chance = found["class_change"], found["other_change"], found["random_class_change"]
        if hurt <= max(other, by_chance, 0):
            return (
                f"Without its experts {self.class_name} tokens change by {hurt:+.3f} nats and other tokens by "
                f"{other:+.3f}; without random experts {self.class_name} tokens change by {by_chance:+.3f}."
            )
        if found["p_adjusted"] > share:
            return (
                f"Random sets of equally used experts may hurt {self.class_name} tokens as specially "
                f"({_compare(found['p_adjusted'], share)})."
            )
        low, high = found["interval"]
        if low <= 0:
            return f"The knock-out's effect is not sure: other stories would give {low:+.3f} to {high:+.3f} nats."
        return None

    def describe(self, share: float) -> dict[str, Any]:
        """The card's figures and verdict."""
        verdict, reason = self.judge(share)
        return {
            "name": f"{self.class_name} ({self.family.name}), layer {self.layer}",
            "layer": self.layer,
            "family": self.family.name,
            "class": self.class_name,
            "experts": list(self.experts),
            "npmi": self.npmi,
            "q_value": self.q_value,
            "p_association": self.p_association,
            "random_keys": {"p_adjusted": self.p_keys, "own_bits": self.own_bits, "random_bits": self.random_bits},
            "knockout": self.knockout,
            "verdict": verdict,
            "reason": reason,
        }


def find_cases(measured: Sequence[Measured], families: Sequence[Family], level: float, most_experts: int) -> list[Case]:
    """Every layer and class with enriched experts, the clearest first; at most `most_experts` experts each."""
    found = []
    for one, family, rate in zip(measured, families, rate_enrichment(measured), strict=True):
        npmi, keys = normalized_pmi(one.table), one.keys
        for layer, label in np.argwhere((rate <= level).any(1)).tolist():
            enriched = np.flatnonzero((rate[layer, :, label] <= level) & (npmi[layer, :, label] > 0))
            enriched = enriched[np.argsort(-npmi[layer, enriched, label], kind="stable")][:most_experts]
            if not len(enriched):
                continue
            found.append(
                Case(
                    family=family,
                    label=label,
                    layer=layer,
                    experts=tuple(enriched.tolist()),
                    npmi=float(npmi[layer, enriched, label].max()),
                    q_value=float(rate[layer, enriched, label].max()),
                    p_association=float(one.p_adjusted[layer]),
                    p_keys=None if keys is None else float(keys.p_value[layer, label]),
                    own_bits=None if keys is None else float(keys.own_class_bits[layer, label]),
                    random_bits=[] if keys is None else keys.random_class_bits[:, layer, label].tolist(),
                )
            )
    return sorted(found, key=lambda case: -case.npmi)


def _compare(p_value: float, share: float) -> str:
    return f"a corrected p of {p_value:.2g}, and {share:.2g} is asked for"


def quote_words(
    chosen: np.ndarray, tokens: np.ndarray, story: np.ndarray, tokenizer: Tokenizer
) -> dict[str, list[dict[str, Any]]]:
    """Favourite words and where they stand. chosen: places of a guild's tokens; tokens and story (N,) in order."""
    counts = Counter(tokens[chosen].tolist()).most_common(NUM_WORDS)
    first = {int(tokens[place]): int(place) for place in chosen[::-1]}
    contexts = [_quote(first[token], tokens, story, tokenizer) for token, _ in counts[:NUM_CONTEXTS]]
    return {
        "words": [{"text": tokenizer.decode([token]).strip(), "count": count} for token, count in counts],
        "contexts": contexts,
    }


def _quote(place: int, tokens: np.ndarray, story: np.ndarray, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token with the text around it; `before` + `word` + `after` is the text as it stands."""
    same = np.flatnonzero(story == story[place])
    start, end = max(same[0], place - CONTEXT_TOKENS), min(same[-1] + 1, place + 1 + CONTEXT_TOKENS)
    before, word, after = (
        tokenizer.decode(tokens[a:b].tolist()) for a, b in ((start, place), (place, place + 1), (place + 1, end))
    )
    bare = word.lstrip()
    return {
        "before": before + word[: len(word) - len(bare)],
        "word": bare,
        "after": after,
        "story": int(story[place]),
        "position": int(place - same[0]),
    }


def count_passed(cases: Sequence[Case], share: float) -> dict[str, int]:
    """How many candidates were still standing after each test."""
    before = [case for case in cases if case.failure_before_knock_out(share) is None]
    return {
        "enrichment": len(cases),
        "association": sum(case.p_association <= share for case in cases),
        "random_keys": len(before),
        "knockout": sum(case.failure_of_knock_out(share) is None for case in before),
    }
