"""How far a validation loss would move with other stories: the standard errors that docs/audit.md states.

Run from the repository's root: `python -m tools.sample_error DATA`, DATA a folder with train, valid and test texts.
"""

import math
import sys

import numpy as np

from some_moe.cli import Parser, write
from some_moe.config import DataConfig
from some_moe.data.dataset import prepare
from some_moe.metrics.trigram import Trigram

LENGTHS, VOCABULARY = (256, 512, 768, 1024), 8192


def find_errors(nats: np.ndarray, tokens: np.ndarray) -> tuple[float, float, float]:
    """Standard errors over stories: of the padded loss from tokens (N,) alone, and from nats (N,), as shares of it; of
    the loss per real token, a ratio of two sums, in nats."""
    count, loss = len(tokens), nats.sum() / tokens.sum()
    by_length, by_loss = (float(one.std(ddof=1) / math.sqrt(count) / one.mean()) for one in (tokens, nats))
    honest = math.sqrt(float(((nats - loss * tokens) ** 2).sum()) * count / (count - 1)) / float(tokens.sum())
    return by_length, by_loss, honest


def score_stories(model: Trigram, rows: list[list[int]]) -> np.ndarray:
    """Nats of each row."""
    return np.array([model.loss([row]) * (len(row) - 1) for row in rows])


def main(arguments: list[str]) -> int:
    """Print a line for each row length."""
    parser = Parser(
        "python -m tools.sample_error", "Standard errors of validation losses over the stories of a sample."
    )
    parser.add_argument("data", metavar="DATA", help="a folder with train, valid and test texts")
    source = parser.parse(arguments).data
    samples = [prepare(DataConfig(source=source, seq_len=length, long="cut"), VOCABULARY) for length in LENGTHS]
    model = Trigram.fit_tuned(samples[-1].train.to_lists(), samples[-1].valid.to_lists(), VOCABULARY)
    for seq_len, sample in zip(LENGTHS, samples, strict=True):
        rows = sample.valid
        by_length, by_loss, honest = find_errors(score_stories(model, rows.to_lists()), rows.lengths.astype(float))
        write(
            f"rows of {seq_len:,}: padded loss {by_length:.1%} from lengths alone, {by_loss:.1%} with a trigram's "
            f"losses; loss over real tokens {honest:.3f} nats ({len(rows):,} stories)\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
