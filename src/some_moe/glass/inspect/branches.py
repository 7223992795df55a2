"""Who serves what in a run with branches: the share of each, and the words that it took over.

Shapes: L layers, N tokens, K experts a token, V ids.
"""

from typing import Any

import numpy as np

from some_moe.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.traces import name_tokens

FEWEST = 5  # times that a word must occur
MOST_WORDS = 12
BASE = "base"


def list_owners(grown: dict[str, Any], num_experts: int) -> tuple[list[str], np.ndarray]:
    """The base and its branches by name, and the number (E,) of whose each expert of a layer is."""
    sizes = [branch["experts"] for branch in grown["branches"]]
    names = [BASE, *(branch["name"] for branch in grown["branches"])]
    return names, np.repeat(np.arange(len(names)), [max(0, num_experts - sum(sizes)), *sizes])[:num_experts]


def measure_branches(grown: dict[str, Any], collection: Collection, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For the base and each branch: its share of all tokens, by gates, and in each layer; and the words it serves most.

    Gates that branches leave are the base's: its own experts run beneath.
    """
    names, owners = list_owners(grown, collection.meta["num_experts"])
    whose = owners[collection.experts]  # (L, N, K)
    counts = np.bincount(collection.tokens)  # (V,)
    often = [int(word) for word in np.flatnonzero(counts >= FEWEST) if word >= len(SPECIAL_TOKENS)]
    texts = dict(zip(often, name_tokens(often, tokenizer), strict=True))
    frequent = [word for word, text in texts.items() if any(letter.isalnum() for letter in text)]
    found = []
    for number, name in enumerate(names):
        served = np.where(whose == number, collection.gates, 0).sum(-1, dtype=np.float64)  # (L, N)
        if not number:
            served += 1 - collection.gates.sum(-1, dtype=np.float64)
        by_token = served.mean(0)  # (N,)
        shares = np.bincount(collection.tokens, by_token, len(counts)) / np.maximum(counts, 1)
        known = [word for word in frequent if shares[word] > 0] if number else []
        best = sorted(known, key=lambda word: (-shares[word], -counts[word]))[:MOST_WORDS]
        found.append(
            {
                "name": name,
                "share": round(float(served.mean()), 6),
                "by_layer": served.mean(1).round(6).tolist(),
                "words": [
                    {"text": texts[word], "count": int(counts[word]), "share": round(float(shares[word]), 4)}
                    for word in best
                ],
            }
        )
    return found
