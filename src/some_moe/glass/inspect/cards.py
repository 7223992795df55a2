"""A guild's card: who belongs to it, its favourite words in context, its figures, and the verdict on it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from some_moe.data.tokenizer import Tokenizer
from some_moe.glass.inspect.association import normalized_pmi
from some_moe.glass.inspect.evidence import Measured, rate_enrichment
from some_moe.glass.inspect.labels import UNLABELLED, Family

NUM_WORDS, NUM_CONTEXTS, CONTEXT_TOKENS = 8, 4, 8
# As it is filed; p-values are corrected, and None without keys; `knockout` is None where not tried.
Card = dict[str, Any]


@dataclass(eq=False)
class Case:
    """A guild that is to be judged: its card, and the tokens that it is said to serve."""

    card: Card
    inside: np.ndarray  # (N,) bool: tokens of the class
    outside: np.ndarray  # (N,) bool: all other words
    losses: np.ndarray = field(default_factory=lambda: np.zeros((0, 5)))  # what a knock-out cost each token


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
            name, inside = family.classes[label], family.labels == label
            card = {
                "name": f"{name} ({family.name}), layer {layer}",
                "layer": layer,
                "family": family.name,
                "class": name,
                "experts": enriched.tolist(),  # the most enriched first
                "npmi": float(npmi[layer, enriched, label].max()),
                "q_value": float(rate[layer, enriched, label].max()),
                "p_association": float(one.p_adjusted[layer]),
                "random_keys": {
                    "p_adjusted": None if keys is None else float(keys.p_adjusted[layer, label]),
                    "own_bits": None if keys is None else float(keys.own_class_bits[layer, label]),
                    "random_bits": [] if keys is None else keys.random_class_bits[:, layer, label].tolist(),
                },
                "knockout": None,
            }
            found.append(Case(card, inside, ~inside & (family.labels != UNLABELLED)))
    return sorted(found, key=lambda case: -case.card["npmi"])


def judge(card: Card, share: float) -> dict[str, str]:
    """The verdict, with its reason in one sentence. share: the level of each test."""
    failure = fail_before_knock_out(card, share) or fail_in_knock_out(card, share)
    if failure:
        return {"verdict": "not supported", "reason": failure}
    knockout = card["knockout"]
    reason = (
        f"Its experts stand out beyond chance and beyond random keys, and without them {card['class']} tokens "
        f"lose {knockout['class_change']:.3f} nats, other tokens {knockout['other_change']:.3f}."
    )
    return {"verdict": "supported", "reason": reason}


def fail_before_knock_out(card: Card, share: float) -> str | None:
    """Why the candidate fails before any expert is taken away; None where it does not."""
    layer, keys = card["layer"], card["random_keys"]
    if card["p_association"] > share:
        failure = f"Shuffled labels may share as much: layer {layer} and {card['family']} have"
        return f"{failure} {_compare(card['p_association'], share)}."
    if keys["p_adjusted"] is None:
        return "The router has no keys, so neither random keys nor a knock-out can be tried."
    if keys["p_adjusted"] > share:
        return (
            f"Random keys may do as well: layer {layer} tells {keys['own_bits']:.4f} bits about {card['class']}, "
            f"with random keys {np.mean(keys['random_bits']):.4f} ({_compare(keys['p_adjusted'], share)})."
        )
    return None


def fail_in_knock_out(card: Card, share: float) -> str | None:
    """Why the knock-out does not speak for the candidate; None where it does."""
    name, found = card["class"], card["knockout"]
    if found is None:
        return "It cannot be knocked out: its class is too rare, or too few other experts would be left to compare."
    hurt, other, by_chance = found["class_change"], found["other_change"], found["random_class_change"]
    if hurt <= max(other, by_chance, 0):
        return (
            f"Without its experts {name} tokens change by {hurt:+.3f} nats and other tokens by {other:+.3f}; "
            f"without random experts {name} tokens change by {by_chance:+.3f}."
        )
    if found["p_adjusted"] > share:
        comparison = _compare(found["p_adjusted"], share)
        return (
            f"Beyond what it costs to lose as much with other experts, other words may be hurt as much ({comparison})."
        )
    low, high = found["interval"]
    if low <= 0:
        return f"The knock-out's effect is not sure: other stories would give {low:+.3f} to {high:+.3f} nats."
    return None


def _compare(p_value: float, share: float) -> str:
    return f"a corrected p of {p_value:.2g}, and {share:.2g} is asked for"


def quote_words(
    chosen: np.ndarray, tokens: np.ndarray, story: np.ndarray, tokenizer: Tokenizer
) -> dict[str, list[dict[str, Any]]]:
    """Favourite words and where they stand. chosen: places of a guild's tokens; tokens and story (N,) in order."""
    counts = Counter(tokens[chosen].tolist()).most_common(NUM_WORDS)
    first = {int(tokens[place]): int(place) for place in chosen[::-1]}
    return {
        "words": [{"text": tokenizer.decode([token]).strip(), "count": count} for token, count in counts],
        "contexts": [_quote(first[token], tokens, story, tokenizer) for token, _ in counts[:NUM_CONTEXTS]],
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


def count_passed(cards: Sequence[Card], share: float) -> dict[str, int]:
    """How many candidates were still standing after each test."""
    before = [card for card in cards if fail_before_knock_out(card, share) is None]
    return {
        "enrichment": len(cards),
        "association": sum(card["p_association"] <= share for card in cards),
        "random_keys": len(before),
        "knockout": sum(fail_in_knock_out(card, share) is None for card in before),
    }
