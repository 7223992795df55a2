"""How specialisation changes with depth, and whether it follows "Lexicon → Mind's Eye → Storyteller".

Shapes: S stories, L layers, E experts, C classes, R bootstrap draws.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from some_moe.glass.inspect.association import cover, entropy_bits, index_selections, mutual_information
from some_moe.glass.inspect.evidence import Measured, Words
from some_moe.glass.inspect.labels import PLACE

DRAWS_AT_ONCE = 32
# What the published reports claim: its name, what a family would do with depth, and which way (0 is a peak).
CLAIMS = {
    "identity": ("Lexicon", "fall with depth", -1),
    "part of speech": ("Mind's Eye", "peak in the middle", 0),
    "plot part": ("Storyteller", "rise with depth", 1),  # of told stories
    PLACE: ("Storyteller", "rise with depth", 1),  # of other text
}
NUM_CLAIMS = 3
SEEDS_LEFT_OUT = "The intervals draw stories anew; what other training seeds would give is not in them."


class Depth(NamedTuple):
    """One family's normalised information by layer, with its bootstrap draws."""

    family: str
    found: np.ndarray  # (L,)
    draws: np.ndarray  # (R, L)

    def interval(self, weights: np.ndarray, level: float) -> tuple[float, float, float]:
        """The weighted sum over layers (weights (L,)) and its basic bootstrap interval.

        The basic interval turns the draws' deviations round, and so takes out the bias that repeated stories add.
        """
        found = float(self.found @ weights)
        low, high = cover(self.draws @ weights, level)
        return found, 2 * found - high, 2 * found - low


def bootstrap_depth(words: Words, one: Measured, weights: np.ndarray) -> Depth:
    """A family's normalised information, and that of draws of stories with replacement.

    weights (R, S): how often each draw has each story. What chance shares is not counted.
    """
    shape, size, num_stories = one.table.shape, one.table.size, weights.shape[1]
    places = index_selections(words.experts, *shape[1:]) + (one.family.labels + words.text.story * size)[:, None]
    tables = np.bincount(places.ravel(), minlength=num_stories * size).reshape(num_stories, size).astype(np.float32)

    def normalize(counts: np.ndarray) -> np.ndarray:
        table = (counts.astype(np.float32) @ tables).reshape(-1, *shape)
        entropy = np.maximum(entropy_bits(table.sum(-2)), 1e-9)
        return np.asarray((mutual_information(table) - one.null_mean) / entropy)

    parts = [normalize(weights[a : a + DRAWS_AT_ONCE]) for a in range(0, len(weights), DRAWS_AT_ONCE)]
    return Depth(one.family.name, normalize(np.ones((1, num_stories)))[0], np.concatenate(parts))


def slope_weights(num_layers: int) -> np.ndarray:
    """Weights (L,) that make the least-squares slope over depth, which runs from 0 to 1."""
    depth = np.linspace(0, 1, num_layers) - 0.5
    return np.asarray(depth / (depth @ depth))


def peak_weights(num_layers: int) -> np.ndarray:
    """Weights (L,) of the middle layer against the mean of the first and the last."""
    weights = np.zeros(num_layers)
    weights[num_layers // 2] = 1
    weights[[0, -1]] -= 0.5
    return weights


def judge_depth(depths: Sequence[Depth], p_values: Sequence[np.ndarray], level: float) -> dict[str, Any]:
    """Slopes of all families, and a verdict on the order that the published reports claim.

    p_values: of each family's association by layer (L,), corrected. What lies below chance counts as nothing.
    """
    num_layers = len(depths[0].found)
    if num_layers < 3:
        return {"statement": "Fewer than three layers have no beginning, middle and end to compare.", "slopes": []}
    slopes = []
    for depth, p_value in zip(depths, p_values, strict=True):
        above = depth._replace(found=np.maximum(depth.found, 0), draws=np.maximum(depth.draws, 0))
        slope, low, high = above.interval(slope_weights(num_layers), level)
        record: dict[str, Any] = {"family": depth.family, "slope": slope, "interval": [low, high]}
        if depth.family in CLAIMS:
            record |= judge_claim(above, p_value, level)
        slopes.append(record)
    claims = [record for record in slopes if "holds" in record]
    num_kept = sum(claim["holds"] for claim in claims)
    if len(claims) < NUM_CLAIMS:
        opening = "The published order cannot be judged whole, for this text has no tags."
    elif num_kept == NUM_CLAIMS:
        opening = "Specialisation follows the published order of Lexicon, Mind's Eye and Storyteller."
    else:
        opening = f"Specialisation does not follow the published order: {num_kept} of {NUM_CLAIMS} claims hold."
    return {
        "statement": " ".join([opening, *(claim["sentence"] for claim in claims), SEEDS_LEFT_OUT]),
        "slopes": slopes,
    }


def judge_claim(depth: Depth, p_value: np.ndarray, level: float) -> dict[str, Any]:
    """Does a family do with depth what is claimed, and is it there at all where it should be strongest?"""
    name, claim, direction = CLAIMS[depth.family]
    num_layers = len(depth.found)
    weights = slope_weights(num_layers) * direction if direction else peak_weights(num_layers)
    strongest = {-1: 0, 0: num_layers // 2, 1: num_layers - 1}[direction]
    # The claims are judged together, so each interval is as wide as all of them need.
    size, low, high = depth.interval(weights, level / NUM_CLAIMS)
    figures = f"({size:+.3f}, interval {low:+.3f} to {high:+.3f})"
    holds = low > 0 and bool(p_value[strongest] <= level)
    if holds:
        sentence = f"{name} holds: {depth.family} does {claim} {figures}."
    elif low > 0:
        sentence = (
            f"{name} fails: {depth.family} seems to {claim} {figures}, but layer {strongest} tells no more of it than "
            f"chance does (corrected p = {p_value[strongest]:.3f})."
        )
    elif high < 0:
        sentence = f"{name} fails: {depth.family} does not {claim} {figures}."
    else:
        sentence = f"{name} is open: it cannot be said that {depth.family} would {claim} {figures}."
    contrast = {"contrast": size, "contrast_interval": [low, high]}
    return {"name": name, "claim": claim, **contrast, "holds": holds, "sentence": sentence}
