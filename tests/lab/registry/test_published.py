"""The published runs are transcribed completely, exactly and with what is assumed marked."""

import math
from decimal import Decimal

import pytest

from some_moe.config import RunConfig
from some_moe.lab.registry import PUBLISHED, find_experiment
from some_moe.lab.registry.records import Epoch, Experiment, Published, Trace

NAMES = [
    *(f"mvp-v{n}" for n in range(2, 7)),
    *(f"V{n}" for n in range(1, 11)),
    *(f"A{n}" for n in range(1, 7)),
    *(f"B{n}" for n in range(1, 4)),
    "v2-professional", "v3.5-decay-fix", "v5-linear", "v5-mlp", "v6-decay-fix", "v7-clamp-fix",
]  # fmt: skip
PRINTED_STEPS = {f"V{n}": 624 for n in range(1, 11)} | {"V7": 1248} | {
    name: 1248 for name in NAMES if name[0] in "AB"
}  # fmt: skip
# A6's final analysis is of its first epoch; A5's and A6's fourth epochs lack these figures, B1's the entropy.
FINAL_ANALYSIS_OF_EPOCH = {"A6": 1}

every_run = pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)


def get_figures(name: str) -> Published:
    published = find_experiment(name).published
    assert published is not None
    return published


def get_rows(run: Experiment) -> list[Epoch | Published]:
    """The printed epochs, and the final figures."""
    assert run.published is not None
    return [*run.published.epochs, run.published]


def print_epoch(epoch: Epoch) -> str:
    figures = (epoch.train_loss, epoch.val_loss, epoch.perplexity, epoch.gini, epoch.entropy_bits)
    return " ".join([str(epoch.epoch), *("-" if figure is None else str(figure) for figure in figures)])


def test_the_thirty_published_runs_exist() -> None:
    assert [run.name for run in PUBLISHED] == NAMES


@every_run
def test_perplexity_is_the_exponential_of_the_loss(run: Experiment) -> None:
    for row in get_rows(run):
        assert row.val_loss is not None
        assert row.perplexity is not None
        lowest = math.exp(float(row.val_loss) - 0.00005) - 0.005
        highest = math.exp(float(row.val_loss) + 0.00005) + 0.005
        assert lowest <= float(row.perplexity) <= highest


@every_run
def test_figures_have_the_printed_number_of_decimals(run: Experiment) -> None:
    for row in get_rows(run):
        for figure, decimals in ((row.train_loss, {4}), (row.val_loss, {4}), (row.perplexity, {2}),
                                 (row.gini, {3, 4}), (row.entropy_bits, {3, 4})):  # fmt: skip
            assert figure is None or len(str(figure).split(".")[1]) in decimals


@every_run
def test_usage_figures_are_possible(run: Experiment) -> None:
    figures = run.published
    assert figures is not None
    experts = run.config.model.num_experts
    for row in get_rows(run):
        assert row.gini is None or 0 <= row.gini < 1
        assert row.entropy_bits is None or 0 < row.entropy_bits <= math.log2(experts)
    assert figures.num_experts in (None, experts)
    if figures.max_entropy_bits is not None:
        assert float(figures.max_entropy_bits) == math.log2(experts)
    if figures.middle_layer is not None:
        assert figures.middle_layer == run.config.model.num_layers // 2


@pytest.mark.parametrize("run", [run for run in PUBLISHED if get_rows(run)[:-1]], ids=lambda run: run.name)
def test_final_figures_are_those_of_the_last_epoch(run: Experiment) -> None:
    figures = run.published
    assert figures is not None
    epochs = {epoch.epoch: epoch for epoch in figures.epochs}
    last = figures.epochs[-1]
    losses = (figures.train_loss, figures.val_loss, figures.perplexity)
    assert losses == (last.train_loss, last.val_loss, last.perplexity)
    analysed = epochs[FINAL_ANALYSIS_OF_EPOCH.get(run.name, last.epoch)]
    for final, of_epoch in ((figures.gini, analysed.gini), (figures.entropy_bits, analysed.entropy_bits)):
        if final is not None and of_epoch is not None:
            assert abs(final - of_epoch) <= Decimal("0.0005")


@every_run
def test_steps_follow_from_stories_batch_and_epochs(run: Experiment) -> None:
    figures = run.published
    assert figures is not None
    assert figures.steps == PRINTED_STEPS.get(run.name)
    assert run.steps is not None
    if figures.steps is not None:
        assert run.steps == figures.steps


@every_run
def test_the_last_printed_epoch_is_the_last_of_the_run(run: Experiment) -> None:
    assert run.published is not None
    assert not run.published.epochs or run.published.epochs[-1].epoch == run.config.train.epochs


@every_run
def test_assumed_fields_are_fields_listed_once(run: Experiment) -> None:
    assert set(run.assumed) <= set(RunConfig.field_names())
    assert len(run.assumed) == len(set(run.assumed))


@every_run
def test_what_no_report_states_is_marked_as_assumed(run: Experiment) -> None:
    assert {
        "model.positions", "model.norm", "gravity.decay_mode", "gravity.normalize", "train.warmup", "train.clip",
        "train.min_rate_share", "train.seed", "data.batching", "data.loss_on", "data.count_padding",
    } <= set(run.assumed)  # fmt: skip
    assert not {"train.kernel", "train.device", "train.compile"} & set(run.assumed)


@pytest.mark.parametrize(
    ("name", "assumed", "stated"),
    [
        ("mvp-v3", ["data.train_subset_size", "model.temperature", "gravity.max_step"],
         ["gravity.alpha", "gravity.theta", "train.weight_decay"]),
        ("mvp-v5", ["gravity.alpha", "gravity.beta", "gravity.delta"], ["gravity.theta"]),
        ("V2", ["gravity.alpha", "gravity.ema_decay", "train.weight_decay"], ["data.train_subset_size"]),
        ("V10", ["model.sparsity"], ["model.init_method"]),
        ("A1", ["train.weight_decay"], ["gravity.beta", "model.temperature", "model.query", "model.init_method"]),
        ("v2-professional", ["model.d_model", "train.epochs"], ["gravity.alpha", "model.top_k", "data.seq_len"]),
        ("v3.5-decay-fix", ["model.num_experts", "data.seq_len", "model.query"], ["model.vocab_size"]),
        ("v5-linear", ["model.num_experts", "data.seq_len"], ["model.query", "data.train_subset_size"]),
        ("v7-clamp-fix", ["gravity.max_step", "gravity.respawn_below", "model.query"], ["gravity.use_alpha"]),
    ],
)  # fmt: skip
def test_stated_and_assumed_fields_are_told_apart(name: str, assumed: list[str], stated: list[str]) -> None:
    run = find_experiment(name)
    assert set(assumed) <= set(run.assumed)
    assert not set(stated) & set(run.assumed)


@every_run
def test_padding_counts_up_to_v4_and_not_after(run: Experiment) -> None:
    masked = run.name in ("v5-linear", "v5-mlp", "v6-decay-fix", "v7-clamp-fix")
    data = run.config.data
    assert data.batching == "padded"
    assert data.source == "hf:roneneldan/TinyStories"
    assert (data.loss_on, data.count_padding) == (("text", False) if masked else ("all_positions", True))
    assert any(note.startswith("Inferred") for note in run.notes)


@pytest.mark.parametrize(
    ("name", "epochs"),
    [
        ("mvp-v5", ["2 0.2041 0.1017 1.11 - -"]),
        ("V1", ["1 3.6590 2.8422 17.15 0.631 3.887", "4 2.5631 2.5555 12.88 0.550 4.192"]),
        ("V7", ["1 1.7605 1.3095 3.70 - -", "4 1.1467 1.1134 3.04 0.661 4.454"]),
        ("A1", ["1 1.2636 0.8872 2.43 0.841 3.537", "2 0.9201 0.8054 2.24 0.791 4.096",
                "3 0.8417 0.7700 2.16 0.807 3.890", "4 0.8061 0.7629 2.14 0.791 4.085"]),
        ("A5", ["1 1.3303 0.8973 2.45 0.839 3.678", "2 0.9184 0.7966 2.22 0.815 3.782",
                "3 0.8267 0.7537 2.12 0.836 3.573", "4 0.7849 0.7460 2.11 - -"]),
        ("B1", ["1 1.5803 0.9990 2.72 0.941 3.272", "2 0.9866 0.8270 2.29 0.923 3.413",
                "3 0.8587 0.7709 2.16 0.912 3.635", "4 0.8064 0.7602 2.14 0.914 -"]),
        ("v3.5-decay-fix", ["2 - 0.7324 2.08 0.835 3.962"]),
    ],
)  # fmt: skip
def test_epochs_are_as_printed(name: str, epochs: list[str]) -> None:
    assert [print_epoch(epoch) for epoch in get_figures(name).epochs] == epochs


@pytest.mark.parametrize(
    ("name", "val_loss", "gini", "entropy"),
    [
        ("mvp-v6", "2.2723", None, None),
        ("A4", "0.7126", "0.8510", "3.4132"),
        ("A6", "1.9682", "0.9038", "2.8484"),
        ("B3", "0.7155", "0.9719", "3.7674"),
        ("v2-professional", "0.5046", "0.772", "4.528"),
        ("v5-linear", "2.8337", "0.372", "6.675"),
        ("v5-mlp", "2.8424", "0.530", "6.279"),
        ("v6-decay-fix", "2.6102", "0.710", None),
        ("v7-clamp-fix", "2.6036", "0.653", None),
    ],
)
def test_final_figures_are_as_printed(name: str, val_loss: str, gini: str | None, entropy: str | None) -> None:
    figures = get_figures(name)
    assert str(figures.val_loss) == val_loss
    assert (figures.gini and str(figures.gini)) == gini
    assert (figures.entropy_bits and str(figures.entropy_bits)) == entropy


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("V7", ["0.676", "4.417"]),
        ("A6", ["0.922", "2.536"]),
        ("v6-decay-fix", ["0.722", "0.710"]),
        ("v7-clamp-fix", ["0.826", "0.653"]),
    ],
)
def test_figures_without_a_field_are_kept(name: str, fragments: list[str]) -> None:
    printed = " ".join(get_figures(name).also_printed)
    assert all(fragment in printed for fragment in fragments)


def test_b3_leaves_fifteen_experts_unused() -> None:
    figures = get_figures("B3")
    assert (figures.experts_used, figures.num_experts) == (497, 512)


def test_traces_of_a1_are_kept_in_their_order() -> None:
    traces = get_figures("A1").traces
    assert Trace(token="lived", layer=4, experts=(55, 20, 23, 1)) in traces
    assert Trace(token="a", layer=4, experts=(1, 23, 20, 55)) in traces
    assert Trace(token="lived", layer=1, experts=(39, 43, 30, 42)) in traces
    assert {t.token for t in traces if t.layer == 7} == {"lived", "in", "a", "was", "and", "to", "his", "day"}


@pytest.mark.parametrize(("name", "words"), [("mvp-v2", "64 experts"), ("V5", "16,384"), ("mvp-v3", "repulsion")])
def test_contradictions_are_noted(name: str, words: str) -> None:
    assert any(words in note for note in find_experiment(name).notes)


@pytest.mark.parametrize("name", NAMES[:5])
def test_the_mvp_repels_with_a_limit_and_counts_selections(name: str) -> None:
    gravity = find_experiment(name).config.gravity
    assert gravity.beta == -0.001
    assert gravity.max_step is not None
    assert (gravity.theta, gravity.theta_percentile) == (200, None)


@every_run
def test_temperature_is_that_of_the_report_that_states_one(run: Experiment) -> None:
    assert run.config.model.temperature == (0.8 if run.series in ("A (v4)", "B (v4)") else 1.0)
