"""Means and intervals over random seeds and stories, paired by story.

The loss of seed s on story i is modelled as m + a_s + b_i + e_si: the seeds that were drawn and the stories that were
drawn both vary, crossed with each other. With S seeds and N stories the variance of the mean is
    var(a)/S + var(b)/N + var(e)/(S·N),
each part estimated from its mean square, and its degrees of freedom are Satterthwaite's: with three seeds an
interval is as wide as three seeds make it, unless the stories matter more. Stories count by their tokens, so that the
mean is nats a token. A difference of two arms is the same arithmetic on the differences of each story; arms with the
same number of seeds are paired by seed too, for the order of the text and the start of the weights are then the same.

Shapes: S seeds, N stories.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % interval; None where one seed cannot tell."""

    mean: float
    half: float | None
    seeds: int
    stories: int | None  # None: the stories are not in it, for their losses are not known

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.half is None else f"{self.mean:.4f} ± {self.half:.4f}"

    def signed(self) -> str:
        return f"{self.mean:+.4f}" if self.half is None else f"{self.mean:+.4f} ± {self.half:.4f}"

    @property
    def is_apart(self) -> bool:
        """Whether zero lies outside."""
        return self.half is not None and abs(self.mean) > self.half


def crossed(nats_SN: Array, tokens_N: Array) -> Interval:
    """The mean loss a token and its interval, from each seed's nats on each story."""
    nats_SN = np.atleast_2d(np.asarray(nats_SN, dtype=np.float64))
    S, N = nats_SN.shape
    tokens_N = np.asarray(tokens_N, dtype=np.float64)
    mean = float(nats_SN.sum() / (S * tokens_N.sum()))
    # What each story adds to the mean, beyond what its tokens would: a ratio estimate, linear in the stories.
    x_SN = (nats_SN - mean * tokens_N) / tokens_N.mean()
    if S < 2 or N < 2:
        return Interval(mean, None, S, N)
    rows_S, columns_N = x_SN.mean(1), x_SN.mean(0)
    rest_SN = x_SN - rows_S[:, None] - columns_N + x_SN.mean()
    of_seeds = N * float(rows_S.var(ddof=1))
    of_stories = S * float(columns_N.var(ddof=1))
    of_rest = float((rest_SN**2).sum()) / ((S - 1) * (N - 1))
    # Both mean squares hold the rest once, and the mean's variance only once in all.
    parts = {S - 1: of_seeds, N - 1: of_stories}
    variance = max(of_seeds + of_stories - of_rest, of_seeds, of_stories) / (S * N)
    total = sum(parts.values()) + of_rest
    if not total > 0:
        return Interval(mean, 0.0, S, N)
    spread = sum(square**2 / freedom for freedom, square in parts.items()) + of_rest**2 / ((S - 1) * (N - 1))
    freedom = max(S - 1.0, (variance * S * N) ** 2 / spread) if spread else S - 1.0
    return Interval(mean, student(freedom) * math.sqrt(variance), S, N)


def difference(one_SN: Array, other_SN: Array, tokens_N: Array) -> Interval:
    """One minus the other, paired by story, and by seed where both have as many; else over the means of the seeds."""
    if len(one_SN) == len(other_SN):
        return crossed(np.asarray(one_SN) - np.asarray(other_SN), tokens_N)
    fewer = min(len(one_SN), len(other_SN))
    return crossed(np.asarray(one_SN)[:fewer] - np.asarray(other_SN)[:fewer], tokens_N)


def over_seeds(losses: Sequence[float]) -> Interval:
    """Of losses alone, without the stories: how seeds differ."""
    S, values = len(losses), np.asarray(losses, dtype=np.float64)
    half = None if S < 2 else student(S - 1) * float(values.std(ddof=1)) / math.sqrt(S)
    return Interval(float(values.mean()), half, S, None)


def student(freedom: float) -> float:
    """The two-sided 95 % point of Student's t, for any number of degrees of freedom from 1 on: by bisection."""
    low, high = 1.9, 13.0
    for _ in range(34):
        middle = (low + high) / 2
        if inside(middle, freedom) < LEVEL:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def inside(t: float, freedom: float) -> float:
    """How much of Student's distribution lies within ±t: Simpson's rule on u = arctan(x/√ν), where it is smooth."""
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    angles = np.linspace(0.0, math.atan(t / math.sqrt(freedom)), 401)
    heights = np.cos(angles) ** (freedom - 1)
    weights = np.ones_like(angles)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    return float(2 * constant * (angles[1] - angles[0]) / 3 * (weights @ heights))
