"""What the published runs have in common, and what none of the reports states."""

from typing import Any

from some_moe.config import RunConfig
from some_moe.lab.registry.records import Experiment, Published, Source

TINY_STORIES = "hf:roneneldan/TinyStories"

PADDED: dict[str, Any] = {
    "data.source": TINY_STORIES,
    "data.batching": "padded",
    "data.loss_on": "all_positions",
    "data.count_padding": True,
}
"""The reports v2 to v4: one story a row, and padding counts in the loss and in the usage."""

MASKED: dict[str, Any] = {"data.source": TINY_STORIES, "data.batching": "padded"}
"""The reports v5 to v7: one story a row, and padding counts nowhere."""

PADDING_NOTE = (
    "Inferred: one story a row, padded to seq_len, with padding counted in the loss and in the usage "
    "figures, so the published losses are not nats per real token."
)
MASKED_NOTE = "Inferred from the size of its loss: padding counts neither in the loss nor in the usage figures."
LINEAR_NOTE = "The linear query network is not stated; it follows from the printed parameter counts."

PLAIN: dict[str, Any] = {"model.embedding_std": 1.0, "train.beta2": 0.999, "train.decay_on": "all"}
"""What the framework does when nobody says otherwise: assumed of every published run."""

ALWAYS_ASSUMED = (
    *PLAIN,
    "model.positions",
    "model.norm",
    "model.dropout",
    "model.score",
    "model.expert_seed",
    "gravity.alpha_floor",
    "gravity.inertia",
    "gravity.beta_schedule",
    "gravity.decay_mode",
    "gravity.max_step",
    "gravity.normalize",
    "gravity.respawn_below",
    "gravity.key_ema",
    "gravity.token_fraction",
    "data.batching",
    "data.loss_on",
    "data.count_padding",
    "train.warmup",
    "train.min_rate_share",
    "train.clip",
    "train.top_k_warmup",
    "train.seed",
)
"""No report states these. What a report only proposes for later (an alpha floor, say) is off here."""

DECAY_ASSUMED = ("gravity.num_samples",)
"""With decay_mode seek: how many queries an under-used key may choose from."""

SIZES_ASSUMED = (
    "model.d_model", "model.num_layers", "model.num_heads", "model.d_ffn", "model.trainability",
)  # fmt: skip
"""For the reports that print neither sizes nor parameter counts."""


def record_run(
    name: str, *, base: RunConfig, changes: dict[str, Any], assumed: tuple[str, ...], series: str, title: str,
    source: Source, published: Published, notes: tuple[str, ...], derived_from: str | None = None,
) -> Experiment:  # fmt: skip
    """Build one published run; assumed fields are listed in the order of the config."""
    everywhere = {*ALWAYS_ASSUMED, *assumed}
    return Experiment(
        name=name,
        series=series,
        title=title,
        config=base.override({"name": name, "experiment": name, **PLAIN, **changes}),
        source=source,
        published=published,
        assumed=tuple(field for field in RunConfig.field_names() if field in everywhere),
        notes=notes,
        derived_from=derived_from,
    )
