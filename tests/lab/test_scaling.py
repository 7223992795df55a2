"""Schedules that fit the data, by hand, and what the record of a scaled run says."""

import json
from pathlib import Path

import pytest

from some_moe.config import ConfigError, DataConfig
from some_moe.data import sources
from some_moe.lab import scaling
from some_moe.lab.jobs import list_differences, make_jobs
from some_moe.lab.measured import list_published_epochs, make_record
from some_moe.lab.registry import EXPERIMENTS
from some_moe.lab.scaling import Stories, count_stories, scale
from some_moe.sinks.display import Display
from some_moe.training.loop import start, train
from some_moe.training.run_folder import RunFolder, read_log
from tests.shared.tiny import A1, TINY


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def write_stories(path: Path, count: int) -> Path:
    path.mkdir()
    for split, number in (("train", count), ("valid", 4), ("test", 4)):
        texts = [f"The {split} story number {n} is about a cat and {n * n} mice." for n in range(number)]
        (path / f"{split}.txt").write_text("\n\n".join(texts))
    return path


# --- scaling, by hand -------------------------------------------------------------------------------------


def test_fewer_stories_make_the_published_steps_in_more_epochs() -> None:
    config, schedule = scale(A1.config, Stories(6903, 400, 400))
    # 10,000 // 32 = 312 steps, four times; 6,903 // 32 = 215 steps, so 5.8 epochs.
    assert (schedule.steps, schedule.steps_an_epoch) == (1248, 215)
    assert (config.train.epochs, config.train.max_steps, config.train.eval_every) == (6, 1248, 312)
    assert schedule.epoch_ends == (312, 624, 936, 1248)
    assert schedule.describe_scaling() == {
        "stories": 6903,
        "published_stories": 10000,
        "epochs": 1248 / 215,
        "published_epochs": 4,
        "steps_an_epoch": 215,
        "published_steps_an_epoch": 312,
    }
    assert schedule.explain() == (
        "6,903 training stories instead of 10,000, so 5.80 epochs of 215 steps instead of 4 of 312 make the same "
        "1,248 steps; validation on 400 of 2,000 stories"
    )
    # Nothing else changes.
    assert [line.split(" (")[0] for line in list_differences(config, A1.config)] == [
        "train.epochs",
        "train.max_steps",
        "train.eval_every",
    ]


def test_every_published_run_keeps_its_number_of_steps_on_fewer_stories() -> None:
    for experiment in EXPERIMENTS:
        if experiment.steps is None:
            continue
        config, schedule = scale(experiment.config, Stories(6903, 400, 400))
        steps_an_epoch = 6903 // config.data.batch_size
        assert schedule.steps == experiment.steps
        assert min(steps_an_epoch * config.train.epochs, config.train.max_steps or 10**9) == experiment.steps
        assert steps_an_epoch * (config.train.epochs - 1) < experiment.steps
        assert len(schedule.epoch_ends) == experiment.config.train.epochs


@pytest.mark.parametrize("stories", [10_000, 9_999, 9_984])
def test_as_many_steps_an_epoch_change_nothing(stories: int) -> None:
    config, schedule = scale(A1.config, Stories(stories, 2000, 2000))
    assert config == A1.config
    assert schedule.describe_scaling() is None
    assert schedule.explain() == ""
    assert schedule.epoch_ends == (312, 624, 936, 1248)


def test_one_story_less_than_a_full_epoch_is_scaled() -> None:
    assert scale(A1.config, Stories(9_983, 2000, 2000))[0].train.max_steps == 1248


def test_max_steps_cut_the_published_epochs_too() -> None:
    config, schedule = scale(A1.config.override({"train.max_steps": 500}), Stories(6903, 400, 400))
    assert (config.train.epochs, config.train.max_steps) == (3, 500)
    assert schedule.epoch_ends == (312, 500)


def test_accumulated_batches_count_as_one_step() -> None:
    asked = A1.config.override({"train.global_batch_tokens": 2 * 32 * 768})
    config, schedule = scale(asked, Stories(6903, 400, 400))
    assert (schedule.steps, schedule.steps_an_epoch, config.train.epochs) == (624, 107, 6)


def test_runs_of_unknown_length_are_not_scaled() -> None:
    everything = A1.config.override({"data.train_subset_size": None})
    config, schedule = scale(everything, Stories(6903, 400, 400))
    assert (config, schedule.steps, schedule.scaled) == (everything, 4 * 215, False)
    packed = A1.config.override({"data.batching": "packed", "data.loss_on": "text", "data.count_padding": False})
    config, schedule = scale(packed, Stories(6903, 400, 400))
    assert (config, schedule.steps, schedule.epoch_ends) == (packed, None, ())


def test_evaluations_that_miss_the_published_epochs_are_refused() -> None:
    stories = Stories(6903, 400, 400)
    with pytest.raises(ConfigError, match=r"train.eval_every 100 passes over .* 312 steps; .* a divisor of 312"):
        scale(A1.config.override({"train.eval_every": 100}), stories)
    assert scale(A1.config.override({"train.eval_every": 104}), stories)[0].train.eval_every == 104


def test_less_than_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives 31 training stories, fewer than one step of 32"):
        scale(A1.config, Stories(31, 4, 4))


def test_stories_are_counted_once_and_cut_to_the_subset_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(write_stories(tmp_path / "texts", 30))
    read: list[str] = []

    def load_corpus(config: DataConfig) -> sources.Corpus:
        read.append(config.source)
        return sources.load_corpus(config)

    monkeypatch.setattr(scaling, "load_corpus", load_corpus)
    data = DataConfig(source=source)
    assert count_stories(data) == Stories(30, 4, 4)
    assert count_stories(data.override({"train_subset_size": 20, "val_subset_size": 3})) == Stories(20, 3, 3)
    assert count_stories(data.override({"train_subset_size": 90, "val_subset_size": 90})) == Stories(30, 4, 4)
    assert read == [source]
    told = DataConfig(source="stories", train_subset_size=12, val_subset_size=2)
    assert count_stories(told) == Stories(12, 2, 2)


# --- a scaled run -----------------------------------------------------------------------------------------


def test_a_scaled_run_spans_the_published_steps_and_records_each_published_epoch(tmp_path: Path) -> None:
    source = str(write_stories(tmp_path / "texts", 24))  # 3 steps an epoch; asked: 5 steps, twice
    changes = TINY | {"data.source": source, "data.train_subset_size": 40, "train.epochs": 2, "train.log_every": 2}
    (job,) = make_jobs([A1], [3], changes)
    folder = RunFolder(tmp_path / "run")
    result = train(start(job.config, folder, Display()))
    log = read_log(folder.path / "metrics.jsonl")
    assert result["steps"] == 10
    assert [epoch["step"] for epoch in result["epochs"]] == [3, 6, 9, 10]
    # The learning rate ends where it should: at the last of the published steps.
    rates = {line["step"]: line["learning_rate"] for line in log if "learning_rate" in line}
    assert rates[10] == pytest.approx(0.1 * job.config.train.learning_rate)
    record = make_record(job, folder)
    rows = record["published_epochs"]
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 5), (2, 10)]
    for row in rows:
        (found,) = [line for line in log if line["step"] == row["step"] and "val_loss" in line]
        assert row["val_loss"] == found["val_loss"]
        assert row["val_loss_padded"] == found["val_loss_padded"]
        assert row["gini"] == found["layers"][1]["gini"]
    losses = {line["step"]: line["train_loss"] for line in log if "train_loss" in line}
    assert rows[0]["train_loss"] == pytest.approx((losses[2] + losses[4]) / 2)
    assert rows[1]["train_loss"] == pytest.approx((losses[6] + losses[8] + losses[10]) / 3)
    assert (rows[0]["train_loss_steps"], rows[1]["train_loss_steps"]) == (2, 3)
    # What a reader needs to judge and repeat it, without a path of this machine.
    assert {**result, **record} == record
    assert record["experiment"] == "A1"
    assert record["seed"] == 3
    assert record["published_steps"] == 1248
    assert record["epochs_scaled"]["epochs"] == pytest.approx(10 / 3)
    data = record["data"]
    assert data["documents"] == {"train": 24, "valid": 4, "test": 4}
    assert data["digest"] == record["data_digest"]
    assert [file["name"] for file in data["files"]] == ["train.txt", "valid.txt", "test.txt"]
    assert data["tokenizer"]["vocab_size"] <= job.config.model.vocab_size
    assert "stories" not in record
    assert record["source"] == "texts"
    assert record["overrides"]["train.epochs"] == 2
    assert set(record["versions"]) == {"python", "torch", "some_moe"}
    assert "--data texts --seeds 3 --model.d-model=32" in record["command"]
    assert "--train.epochs=2 " in record["command"]
    assert str(tmp_path) not in json.dumps(record)


def test_an_unscaled_record_takes_its_training_loss_from_all_steps(tmp_path: Path) -> None:
    changes = TINY | {"model.num_experts": 4, "train.epochs": 2, "train.log_every": 100}
    (job,) = make_jobs([A1], [0], changes)
    folder = RunFolder(tmp_path / "run")
    result = train(start(job.config, folder, Display()))
    record = make_record(job, folder)
    assert record["epochs_scaled"] is None
    assert [row["train_loss"] for row in record["published_epochs"]] == [e["train_loss"] for e in result["epochs"]]
    assert [row["train_loss_steps"] for row in record["published_epochs"]] == [2, 2]


def test_a_run_that_stopped_early_has_a_last_row_where_it_stopped() -> None:
    _, schedule = scale(A1.config, Stories(6903, 400, 400))
    line = {"tokens": 1, "val_loss": 3.0, "val_loss_on_padding": None, "val_loss_padded": None, "perplexity": 20.0}
    log = [{"step": step, "bits_per_byte": 1.0, "layers": []} | line for step in (215, 312, 430)]
    rows = list_published_epochs(schedule, {"steps": 430, "epochs": [], "middle_layer": None}, log)
    assert [(row["step"], row["gini"], row["train_loss"]) for row in rows] == [(312, None, None), (430, None, None)]
