"""The studies of what the published numbers mean: how they were trained, and how many steps they took."""

from functools import partial

from some_moe.lab.registry.derivation import OWN, derive

STEADY = {"train.warmup": 0.0, "train.clip": 0.0, "train.min_rate_share": 1.0}
"""The barest loop: no report states a warm-up, a falling rate or clipping for any run."""

study = partial(derive, series="Studies: what the published numbers mean", source=OWN)
QUESTION = "What no report states had to be assumed: is another choice nearer to the published loss?"

PROTOCOL_STUDIES = (
    *(
        study(f"{base}-steady", base, STEADY, f"{base} at a steady rate, no clipping", question=QUESTION)
        for base in ("V1", "V2", "V8", "A1", "A4", "B1")
    ),
    *(
        study(f"{base}-sines", base, {"model.positions": "sinusoidal"}, f"{base} with added sines", question=QUESTION)
        for base in ("V1", "V2", "V8", "A1", "A4", "A6", "B1")
    ),
    *(
        study(f"{base}-post-norm", base, {"model.norm": "post"}, f"{base} with post-norm", question=QUESTION)
        for base in ("V1", "V2", "A1")
    ),
    *(
        study(f"{base}-dropout", base, {"model.dropout": 0.1}, f"{base} with dropout of 0.1", question=QUESTION)
        for base in ("V1", "V2", "V8", "A1", "A4", "A6")
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
