"""Names, lookup, derivation: every experiment is found, valid and honest about its base."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from some_moe.config import ConfigError, RunConfig
from some_moe.lab import registry
from some_moe.lab.registry import BASELINES, EXPERIMENTS, find_experiment, group_by_series
from some_moe.lab.registry.records import Experiment

every_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)

DERIVED = [experiment for experiment in EXPERIMENTS if experiment.derived_from]

# Runs that equal their base on purpose: the first of a row of variants, or a difference made at evaluation.
EQUAL_TO_BASE = {"mvp-A-32e-k4", "C-still-keys", "C-moving-keys", "context-768"}

STUDIES = [
    "mvp-A-32e-k4", "mvp-A-64e-k4", "mvp-A-32e-k8", "mvp-B-4x256", "mvp-B-6x320", "C-still-keys", "C-moving-keys",
    "D1-beta-scale", "D2-frozen-deep", "D3-grounding", "A5-8-heads", "A6-8-heads", "key-norm", "entropy-band",
    "step-limit", "key-ema", "alpha-floor", "inertia-by-count", "alpha-floor-by-count", "beta-anneal",
    "topk-warmup", "key-cadence", "token-subsample",
    "k2-f1536", "heads-4", "heads-6", "heads-12", "heads-16", "linear-query", "lora-4", "lora-8", "full-training",
    "balance-bias", "cosine-scores", "centred-queries", "shared-expert", "shared-down", "query-residual",
    "output-scale", "gains", "weight-keys", "context-256", "context-512", "context-768", "context-1024",
    "full-tinystories",
]  # fmt: skip
CONTROLS = [
    "dense-equal-trainable", "dense-equal-active", "frozen-dense", "hash-routing", "frozen-keys", "learned-keys",
    "trained-mixture-aux", "trained-mixture-bias", "trained-gravity",
]  # fmt: skip


@pytest.mark.parametrize("file", sorted(Path(registry.__file__).parent.glob("*.yaml")), ids=lambda file: file.name)
def test_no_key_is_written_twice_in_one_mapping(file: Path) -> None:
    def walk(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(set(keys)) == len(keys), f"line {node.start_mark.line + 1}: {sorted(keys)}"
        for inner in node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else ():
            for part in inner if isinstance(inner, tuple) else (inner,):
                walk(part)

    walk(yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader))


def test_the_two_runs_of_study_c_differ_in_what_is_done_with_them() -> None:
    still, moving = find_experiment("C-still-keys").afterwards, find_experiment("C-moving-keys").afterwards
    assert still is not None
    assert moving is not None
    assert still.command == moving.command == "some adapt RUN --stream OLD NEW OLD"
    assert (still.row, moving.row) == ("still", "gravity")


def test_names_are_unique_even_without_case() -> None:
    assert len({experiment.name.casefold() for experiment in EXPERIMENTS}) == len(EXPERIMENTS)


@pytest.mark.parametrize("name", [*STUDIES, *CONTROLS])
def test_every_study_and_control_is_registered_with_a_question(name: str) -> None:
    experiment = find_experiment(name)
    assert experiment.question.endswith("?")
    assert experiment.published is None


@every_experiment
def test_config_survives_yaml(experiment: Experiment) -> None:
    assert RunConfig.from_yaml(experiment.config.to_yaml()) == experiment.config


@every_experiment
def test_config_carries_the_registered_name(experiment: Experiment) -> None:
    assert experiment.config.name == experiment.config.experiment == experiment.name


@every_experiment
def test_texts_are_short_and_whole(experiment: Experiment) -> None:
    assert 0 < len(experiment.title) <= 40
    assert experiment.source.report
    assert set(experiment.assumed) <= set(RunConfig.field_names())
    for note in experiment.notes:
        assert note.endswith(".")


@pytest.mark.parametrize("experiment", DERIVED, ids=lambda experiment: experiment.name)
def test_a_derived_run_differs_from_its_base_unless_it_says_so(experiment: Experiment) -> None:
    assert experiment.derived_from is not None
    base = find_experiment(experiment.derived_from)
    own = {"name": base.name, "experiment": base.name}
    assert (experiment.config.override(own) == base.config) == (experiment.name in EQUAL_TO_BASE)


def test_what_a_study_sets_is_no_longer_assumed() -> None:
    base = find_experiment("A6")
    assert "train.clip" in base.assumed
    assert "train.clip" not in find_experiment("A6-no-clip").assumed
    assert "train.warmup" in find_experiment("A6-no-clip").assumed


def test_replacing_a_room_clears_what_was_assumed_in_it() -> None:
    assumed = find_experiment("frozen-keys").assumed
    assert not [field for field in assumed if field.startswith("gravity.")]
    assert "data.loss_on" in assumed


@pytest.mark.parametrize(
    ("written", "meant"),
    [("A1", "A1"), ("a1", "A1"), ("v5", "V5"), ("MVP-V5", "mvp-v5"), ("V5-LINEAR", "v5-linear"),
     ("d1-Beta-Scale", "D1-beta-scale")],
)  # fmt: skip
def test_lookup_ignores_case(written: str, meant: str) -> None:
    assert find_experiment(written).name == meant


@pytest.mark.parametrize(
    ("written", "suggested"),
    [("A11", "'A1'"), ("v5-liner", "'v5-linear'"), ("DENSE-EQUAL-TRAINABEL", "'dense-equal-trainable'"),
     ("d2-frozen", "'D2-frozen-deep'")],
)  # fmt: skip
def test_an_unknown_name_gets_the_nearest_one(written: str, suggested: str) -> None:
    with pytest.raises(ConfigError, match=f"'{written}' is not a registered experiment; did you mean {suggested}"):
        find_experiment(written)


def test_a_name_near_nothing_is_sent_to_the_list() -> None:
    with pytest.raises(ConfigError, match="some experiments list"):
        find_experiment("€€€")


def test_series_keep_all_experiments_in_order() -> None:
    groups = group_by_series()
    assert list(groups)[:5] == ["MVP", "V (v3)", "A (v4)", "B (v4)", "v2–v7 reports"]
    assert list(groups)[-1] == "Baselines"
    assert [experiment for group in groups.values() for experiment in group] == list(EXPERIMENTS)


def test_steps_are_unknown_where_the_number_of_stories_is() -> None:
    assert find_experiment("full-tinystories").steps is None


def test_steps_stop_at_max_steps() -> None:
    run = find_experiment("A1")
    assert replace(run, config=run.config.override({"train.max_steps": 100})).steps == 100
    assert replace(run, config=run.config.override({"train.max_steps": 5000})).steps == 1248


def test_steps_are_of_global_batch_tokens_where_they_are_set() -> None:
    run = find_experiment("A1")
    four_batches = 3 * run.config.data.batch_size * run.config.data.seq_len + 1
    assert replace(run, config=run.config.override({"train.global_batch_tokens": four_batches})).steps == 1248 // 4


def test_the_dense_control_trains_exactly_the_parameters_of_a1() -> None:
    assert find_experiment("dense-equal-trainable").parameters.trainable == find_experiment("A1").parameters.trainable


def test_the_active_controls_are_as_wide_as_the_experts_that_run() -> None:
    assert find_experiment("dense-equal-active").config.model.dense_width == 4096
    assert find_experiment("frozen-dense").config.model.dense_width == 4096


def test_only_the_gravity_control_moves_keys() -> None:
    assert [control.name for control in BASELINES if control.config.gravity.moves_keys] == ["trained-gravity"]


@pytest.mark.parametrize("control", BASELINES, ids=lambda control: control.name)
def test_controls_share_the_data_and_schedule_of_a1(control: Experiment) -> None:
    a1 = find_experiment("A1").config
    assert (control.config.data, control.config.train) == (a1.data, a1.train)


def test_the_deep_studies_touch_the_second_half_only() -> None:
    assert find_experiment("D1-beta-scale").config.gravity.beta_layer_scale == (1.0,) * 8 + (0.5,) * 8
    assert find_experiment("D2-frozen-deep").config.gravity.frozen_layers == tuple(range(8, 16))
    assert find_experiment("D3-grounding").config.model.grounding == 0.1


def test_the_anneal_is_of_a_repulsion() -> None:
    gravity = find_experiment("beta-anneal").config.gravity
    assert (gravity.beta, gravity.beta_end, gravity.beta_schedule) == (-0.003, 0.0005, "linear")
