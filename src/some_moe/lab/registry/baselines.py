"""The controls: what else the same shape, the same trainable parameters or the same compute could do.

All derive from A1 and inherit its rows, schedule and padding, so that only the feed-forward layer differs.
"""

from typing import Any

from some_moe.config import GravityConfig
from some_moe.lab.registry.derivation import derive
from some_moe.lab.registry.published import get_published
from some_moe.lab.registry.records import Experiment, Source

NO_REPORT = Source("this laboratory; the reports have no controls")
A1 = get_published("A1").config.model
ACTIVE_WIDTH = A1.top_k * A1.d_ffn

STILL: dict[str, Any] = {"gravity": GravityConfig.off()}


def control(name: str, title: str, changes: dict[str, Any], question: str, notes: tuple[str, ...] = ()) -> Experiment:
    """Return A1 with another feed-forward layer or another router."""
    return derive(name, "A1", changes, title, question=question, series="Baselines", source=NO_REPORT, notes=notes)


BASELINES: tuple[Experiment, ...] = (
    control(
        "dense-equal-trainable",
        "dense, A1's trainable parameters",
        {**STILL, "model.ffn": "dense", "model.dense_width": 2 * A1.d_model},
        "What are the query network's parameters worth as a plain feed-forward layer, without experts?",
    ),
    control(
        "dense-equal-active",
        "dense, A1's active width",
        {**STILL, "model.ffn": "dense", "model.dense_width": ACTIVE_WIDTH},
        "What does a trained dense layer reach with the width that runs for each token?",
    ),
    control(
        "frozen-dense",
        "one frozen dense layer, active width",
        {**STILL, "model.ffn": "frozen_dense", "model.dense_width": ACTIVE_WIDTH},
        "Is a routed library of frozen experts worth more than one frozen layer?",
    ),
    control(
        "hash-routing",
        "experts by a hash of the token",
        {**STILL, "model.router": "hash"},
        "Is routing by content worth more than routing by a fixed table?",
    ),
    control(
        "frozen-keys",
        "random keys that stay still",
        STILL,
        "Is it worth anything that the keys move?",
    ),
    control(
        "learned-keys",
        "keys trained by gradient",
        {**STILL, "model.router": "learned"},
        "Are local rules as good as gradients at placing the keys?",
    ),
    control(
        "trained-mixture-aux",
        "a standard mixture, auxiliary loss",
        {**STILL, "model.router": "learned", "model.trainability": "full", "model.balance_loss": 0.01},
        "What does the usual mixture of experts reach, balanced by an auxiliary loss?",
    ),
    control(
        "trained-mixture-bias",
        "a standard mixture, balance bias",
        {
            "gravity": GravityConfig.off(balance_rate=0.01),
            "model.router": "learned",
            "model.trainability": "full",
        },
        "What does the usual mixture of experts reach, balanced by a bias on the selection?",
    ),
    control(
        "trained-gravity",
        "trained experts, gravity keys",
        {"model.trainability": "full"},
        "With trained experts, is gravity as good as a learned router?",
        notes=("The same run as the study full-training.",),
    ),
)
