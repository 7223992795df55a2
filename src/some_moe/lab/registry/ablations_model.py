"""The studies of routing, of what an expert is, and of backbone, context and data."""

from functools import partial

from some_moe.config import GravityConfig
from some_moe.lab.registry.derivation import OWN, derive
from some_moe.lab.registry.published_v3 import V3_REPORT

# The MVP report's studies A (fix the backbone, vary the experts), B (the reverse) and C (a domain shift).

study = partial(derive, series="Studies: the MVP's A, B and C")

MORE_EXPERTS = "On a fixed backbone, does it help to have more experts, or to mix more of them per token?"
DOMAIN_SHIFT = "Do keys that keep moving after training help on a text of another domain?"
ADAPTATION_NOTE = (
    "Both runs of C train as mvp-v3; the difference is made at evaluation, on a text of another domain: "
    "`some eval` leaves the keys still, and `some eval --adapt` lets them move after scoring."
)

MVP_STUDIES = (
    study("mvp-A-32e-k4", "mvp-v3", {}, "mvp-v3 as it is", question=MORE_EXPERTS),
    study("mvp-A-64e-k4", "mvp-v3", {"model.num_experts": 64}, "mvp-v3 with 64 experts", question=MORE_EXPERTS),
    study("mvp-A-32e-k8", "mvp-v3", {"model.top_k": 8}, "mvp-v3 with top_k 8", question=MORE_EXPERTS),
    study(
        "mvp-B-4x256",
        "mvp-v3",
        {"model.d_model": 256, "model.num_layers": 4, "model.num_heads": 4},
        "mvp-v3 on the core of mvp-v2",
        question="Was most of the gain from mvp-v2 to mvp-v3 the larger core?",
        notes=("With its expert count corrected to 32, mvp-v2 has this shape too; only the epochs differ.",),
    ),
    study(
        "mvp-B-6x320",
        "mvp-v3",
        {"model.d_model": 320, "model.num_layers": 6, "model.num_heads": 5},
        "mvp-v3 on a middle core",
        question="Is there a better trade of compute against perplexity between the two cores?",
        notes=("The heads are not stated; 5 keeps them 64 wide, as in both of the other cores.",),
    ),
    study(
        "C-still-keys",
        "mvp-v3",
        {},
        "domain shift, keys still",
        question=DOMAIN_SHIFT,
        notes=(ADAPTATION_NOTE,),
    ),
    study(
        "C-moving-keys",
        "mvp-v3",
        {},
        "domain shift, keys moving",
        question=DOMAIN_SHIFT,
        notes=(ADAPTATION_NOTE,),
    ),
)

# How a token finds its experts.

study = partial(derive, series="Studies: how a token finds its experts")

ROUTING_STUDIES = (
    study(
        "entropy-band",
        "A1",
        {"model.learn_temperature": True, "model.entropy_band": (1.5, 2.5)},
        "learned temperature in a band",
        question="Does a learned temperature that keeps the gate's entropy in a band steady routing?",
        notes=(
            "The band of 1.5 to 2.5 nats is that of the softmax over all experts; over 4 chosen ones entropy "
            "is 1.386 at most.",
        ),
    ),
    study(
        "topk-warmup",
        "A1",
        {"train.top_k_warmup": 0.15, "train.top_k_ramp": 0.1},
        "one expert a token at first",
        question="Does starting with k = 1 for 10–20 % of the steps lower the final loss?",
        notes=("15 % is the middle of the advised range; the length of the ramp, 10 %, is our choice.",),
    ),
    study(
        "linear-query",
        "A1",
        {"model.query": "linear"},
        "linear query network",
        question="Does the two-layer query network pay for itself?",
        notes=("It trains 3.54 M parameters less than A1.",),
    ),
    study(
        "cosine-scores",
        "A1",
        {"model.score": "cosine"},
        "cosine scores",
        question="Does it help to compare directions only, whatever the length of query and key?",
        source=OWN,
    ),
    study(
        "centred-queries",
        "A1",
        {"model.center_queries": True},
        "centred queries",
        question="Are queries so alike that their common mean decides the routing?",
        source=OWN,
    ),
    study(
        "weight-keys",
        "A1",
        {"model.router": "weights", "gravity": GravityConfig.off()},
        "keys from the experts' weights",
        question="Do keys that follow from what an expert computes beat keys that move?",
        source=OWN,
    ),
    study(
        "query-residual",
        "A1",
        {"model.query_residual": True},
        "query added to the residual stream",
        question="Is the query network worth more as a feed-forward layer than as an address?",
        source=OWN,
    ),
)

# What an expert is.

study = partial(derive, series="Studies: the experts")
LOW_RANK = "How much of full training does a low-rank update of frozen experts give?"

LIBRARY_STUDIES = (
    study(
        "k2-f1536",
        "A1",
        {"model.top_k": 2, "model.d_ffn": 1536},
        "two experts of 1,536",
        question="Are two wider experts as good as four of 1,024, and faster?",
        notes=("The report asks to keep top_k × d_ffn constant, yet 2 × 1,536 is three quarters of 4 × 1,024.",),
    ),
    study(
        "k2-f2048",
        "A1",
        {"model.top_k": 2, "model.d_ffn": 2048},
        "two experts of 2,048",
        question="With top_k × d_ffn truly constant, are fewer and wider experts as good?",
        source=OWN,
    ),
    study(
        "lora-4",
        "A1",
        {"model.trainability": "lora", "model.lora_rank": 4},
        "trained rank-4 update",
        question=LOW_RANK,
    ),
    study(
        "lora-8",
        "A1",
        {"model.trainability": "lora", "model.lora_rank": 8},
        "trained rank-8 update",
        question=LOW_RANK,
    ),
    study(
        "full-training",
        "A1",
        {"model.trainability": "full"},
        "experts trained whole",
        question="What do frozen experts give up against trained ones?",
        notes=("The same run as the baseline trained-gravity.",),
    ),
    study(
        "shared-expert",
        "A1",
        {"model.shared_expert": 1024},
        "a trained expert beside the library",
        question="Does one trained expert that runs for every token free the others to specialise?",
        source=OWN,
    ),
    study(
        "shared-down",
        "A1",
        {"model.shared_down": True},
        "one trained down-projection",
        question="Are frozen up-projections enough, when what they write back is trained?",
        source=OWN,
    ),
    study(
        "output-scale",
        "A1",
        {"model.output_scale": True},
        "learned scale on the library's output",
        question="Does the model turn the library down when it may?",
        source=OWN,
    ),
    study(
        "gains",
        "A1",
        {"model.gains": True},
        "trained gain on every hidden unit",
        question="How far do the cheapest trained parameters inside frozen experts go?",
        source=OWN,
    ),
)

# Backbone, context and data.

study = partial(derive, series="Studies: backbone, context and data")
SEQ_LENS = (256, 512, 768, 1024)

BACKBONE_STUDIES = (
    *(
        study(
            f"heads-{heads}",
            "A1",
            {"model.num_heads": heads},
            f"A1 with {heads} heads",
            question="What do the heads do by themselves, which A5 and A6 change together with the depth?",
        )
        for heads in (4, 6, 12, 16)
    ),
    *(
        study(
            f"context-{seq_len}",
            "A1",
            {"data.seq_len": seq_len},
            f"rows of {seq_len}, padding counted",
            question="Is a longer context better, or only diluted by padding?",
            source=V3_REPORT,
        )
        for seq_len in SEQ_LENS
    ),
    *(
        study(
            f"context-{seq_len}-text",
            "A1",
            {"data.seq_len": seq_len, "data.loss_on": "text", "data.count_padding": False},
            f"rows of {seq_len}, text only",
            question="Is a longer context better when padding counts nowhere?",
            source=OWN,
        )
        for seq_len in SEQ_LENS
    ),
    study(
        "full-tinystories",
        "A1",
        {"data.train_subset_size": None, "data.val_subset_size": None},
        "A1 on all of TinyStories",
        question="What does the whole dataset change?",
    ),
)
