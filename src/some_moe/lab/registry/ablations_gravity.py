"""The studies of how the keys move, and of why the deep model A6 collapsed."""

from functools import partial

from some_moe.config import GravityConfig
from some_moe.lab.registry.ablations_protocol import STEADY
from some_moe.lab.registry.derivation import OWN, derive
from some_moe.lab.registry.published_v4 import SERIES_A

# Study D of the v4 report cures the deep model by its later layers; the others ask first what ailed it.

study = partial(derive, series="Studies: depth and collapse", source=SERIES_A)
suspect = partial(
    derive,
    series="Studies: depth and collapse",
    source=OWN,
    question="Heads grew with depth, and much of the training is not stated: what made A6 collapse?",
)

BARE = {"train.warmup": 0.0, "train.clip": 0.0}

DEPTH_STUDIES = (
    study(
        "D1-beta-scale",
        "A6",
        {"gravity.beta_layer_scale": (1.0,) * 8 + (0.5,) * 8},
        "A6, weaker pull in layers 8–15",
        question="Does a weaker peer pull in the late layers keep a deep model from collapsing?",
    ),
    study(
        "D2-frozen-deep",
        "A6",
        {"gravity.frozen_layers": tuple(range(8, 16))},
        "A6, still keys in layers 8–15",
        question="Is self-organisation in the first half enough for a deep model?",
    ),
    study(
        "D3-grounding",
        "A6",
        {"model.grounding": 0.1},
        "A6, grounded queries",
        question="Does a share of the previous layer's query keep the routing of late layers stable?",
    ),
    study(
        "A5-8-heads",
        "A5",
        {"model.num_heads": 8},
        "A5 with 8 heads",
        question="What do 12 layers do when the heads stay those of A1 and A3?",
        source=OWN,
    ),
    suspect("A6-8-heads", "A6", {"model.num_heads": 8}, "A6 with 8 heads"),
    suspect("A6-no-warmup", "A6", {"train.warmup": 0.0}, "A6 without warm-up"),
    suspect("A6-no-clip", "A6", {"train.clip": 0.0}, "A6 without clipping"),
    suspect("A6-bare", "A6", BARE, "A6 without warm-up and clipping"),
    suspect("A6-post-norm", "A6", {"model.norm": "post"}, "A6 with post-norm"),
    suspect("A6-post-norm-bare", "A6", BARE | {"model.norm": "post"}, "A6-bare with post-norm"),
    suspect("A6-steady", "A6", STEADY, "A6 at a steady rate, no clipping"),
    suspect("A6-post-norm-steady", "A6", STEADY | {"model.norm": "post"}, "the same with post-norm"),
    suspect("A6-rate-2x", "A6", {"train.learning_rate": 1.2e-3}, "A6 at twice the rate"),
    suspect("A6-rate-4x", "A6", {"train.learning_rate": 2.4e-3}, "A6 at four times the rate"),
    suspect("A6-rate-4x-bare", "A6", BARE | {"train.learning_rate": 2.4e-3}, "A6-bare at four times the rate"),
    suspect("A6-rate-10x-bare", "A6", BARE | {"train.learning_rate": 6e-3}, "A6-bare at ten times the rate"),
    suspect(
        "A6-post-norm-4x-bare",
        "A6",
        BARE | {"train.learning_rate": 2.4e-3, "model.norm": "post"},
        "A6-post-norm-bare at four times the rate",
    ),
    suspect(
        "A6-still-keys",
        "A6",
        {"gravity.use_alpha": False, "gravity.use_beta": False, "gravity.use_delta": False},
        "A6 with keys that never move",
    ),
    suspect("A6-small-embeddings", "A6", {"model.embedding_std": 0.02}, "A6 with embeddings that start small"),
    suspect("A6-centred-queries", "A6", {"model.center_queries": True}, "A6 with centred queries"),
    suspect(
        "A6-text-loss", "A6", {"data.loss_on": "text", "data.count_padding": False}, "A6 without padding in the loss"
    ),
)

# How the keys move. The MVP's D names no base; A1 is the common one.

study = partial(derive, series="Studies: how the keys move")
ONE_RULE_LESS = "What is each rule of gravity worth on its own?"

MOVEMENT_STUDIES = (
    study(
        "key-norm",
        "A1",
        {"gravity.normalize": True, "gravity.decay_mode": "seek"},
        "keys of unit length",
        question="Does it steady routing to scale the keys to unit length after each step?",
        notes=("Under-used keys must seek a query here, for a shrinking that is undone at once does nothing.",),
    ),
    study(
        "step-limit",
        "A1",
        {"gravity.max_step": 0.005},
        "key moves clipped",
        question="Does it steady routing to limit how far a key moves in one step?",
        notes=("The report names no limit; 0.005 is alpha / 2, the pull on an expert of fair use.",),
    ),
    study(
        "key-ema",
        "A1",
        {"gravity.key_ema": 0.9},
        "routing by smoothed keys",
        question="Does it steady routing to use an average of past keys?",
        notes=("The report names no decay; 0.9 averages over about ten steps.",),
    ),
    study(
        "alpha-floor",
        "A1",
        {"gravity.alpha_floor": 0.005},
        "attraction floor of 0.005",
        question="Do experts adapt better when attraction has a floor?",
    ),
    study(
        "beta-anneal",
        "mvp-v3",
        {"gravity.beta": -0.003, "gravity.beta_schedule": "linear", "gravity.beta_end": 0.0005},
        "mvp-v3, repulsion 3e-3 → 5e-4",
        question="Does a strong repulsion at first, weaker later, spread the experts and prevent collapse?",
        notes=("The advice is the MVP report's, where beta repels; so is the base.",),
    ),
    study(
        "peer-repulsion",
        "A1",
        {"gravity.beta": -0.005, "gravity.max_step": 0.1},
        "the peer force pushes apart",
        question="beta repels in the MVP report and pulls in v4: which sign is better, all else equal?",
        source=OWN,
        notes=("A repulsion needs a limit: max_step 0.1, which A1 has not.",),
    ),
    study(
        "no-attraction",
        "A1",
        {"gravity.use_alpha": False},
        "without attraction",
        question=ONE_RULE_LESS,
        source=OWN,
    ),
    study(
        "no-peer-force",
        "A1",
        {"gravity.use_beta": False},
        "without the peer force",
        question=ONE_RULE_LESS,
        source=OWN,
    ),
    study("no-decay", "A1", {"gravity.use_delta": False}, "without decay", question=ONE_RULE_LESS, source=OWN),
    study(
        "key-cadence",
        "A1",
        {"gravity.every": 2},
        "keys move every other step",
        question="Does moving the keys every other step cost quality, and what time does it save?",
    ),
    study(
        "token-subsample",
        "A1",
        {"gravity.token_fraction": 0.5},
        "half of the tokens move the keys",
        question="Does letting half of the tokens count cost quality, and what time does it save?",
    ),
    study(
        "balance-bias",
        "A1",
        {"gravity.balance_rate": 0.01},
        "selection-only balance bias",
        question="Does a bias on the selection alone even out the load, and at what cost in loss?",
        source=OWN,
    ),
    study(
        "balance-still-keys",
        "A1",
        {"gravity": GravityConfig.off(balance_rate=0.01)},
        "balance bias, still keys",
        question="Is the balance bias by itself as good as moving keys?",
        source=OWN,
    ),
)
