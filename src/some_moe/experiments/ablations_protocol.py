"""The studies of what the published numbers mean: how they were trained, and how many steps they took."""

from functools import partial

from some_moe.experiments.derivation import OWN, derive

STEADY = {"train.warmup": 0.0, "train.clip": 0.0, "train.min_rate_share": 1.0}
"""The barest loop: no report states a warm-up, a falling rate or clipping for any run."""

study = partial(derive, series="Studies: what the published numbers mean", source=OWN)
steady = partial(
    study,
    changes=STEADY,
    question="No warm-up, falling rate or clipping is stated: is a loop without them nearer to the report?",
)

PROTOCOL_STUDIES = (
    *(
        steady(f"{base}-steady", base, title=f"{base} at a steady rate, no clipping")
        for base in ("V1", "V2", "V8", "A1", "A4", "B1")
    ),
    study(
        "V7-half",
        "V7",
        {"train.epochs": 2},
        "V7 with the steps of V8",
        question="Is a small batch better, or only the twice as many steps that came with it?",
        notes=("Against V8: equal steps, half the stories. V7 itself: equal stories, twice the steps.",),
    ),
    study(
        "V8-long",
        "V8",
        {"train.epochs": 8},
        "V8 with the steps of V7",
        question="Is a small batch better, or only the twice as many steps that came with it?",
        notes=("Against V7: equal steps, twice the stories.",),
    ),
)
