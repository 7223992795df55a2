"""The studies: what is planned can be run, tuning goes by stages, and pages say what is known and what is not."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from some_moe.config import ConfigError
from some_moe.lab.registry import EXPERIMENTS
from tools.studies.__main__ import main
from tools.studies.costs import GPU_BYTES, WORKERS, estimate, foretell, minutes_of
from tools.studies.intervals import crossed, difference, over_seeds, student
from tools.studies.mini import SIZES
from tools.studies.outcomes import Outcomes
from tools.studies.pages import make_pages
from tools.studies.plan import MOST_LEFT_OUT, Arm, Plan, Run, Settings, find_loss, read_plan
from tools.studies.records import HOME, Record, pack, slim, take, unpack
from tools.studies.texts import lay_out

ROOT = Path(__file__).parents[2]
PLAN = read_plan()
TYPICAL = Settings(1.2e-3, 0.1, 0.1)


def typical(arm: Arm) -> Run:
    settings = TYPICAL if arm.grid is not None or arm.like else None
    return Run(arm=arm, seed=1, settings=settings, passes=8 if arm.seconds_of else None)


# --- the plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", PLAN.studies)
def test_every_planned_run_is_valid_and_fits_the_chip(study: str) -> None:
    for arm in PLAN.studies[study].arms:
        cost = estimate(typical(arm))
        assert cost.steps > 0
        assert cost.used_bytes < GPU_BYTES / 2, arm.key
        assert cost.gpu_seconds < 8 * 60, f"{arm.key} does not end within a command"


@pytest.mark.parametrize("study", PLAN.studies)
def test_the_rehearsal_of_every_planned_run_is_valid(study: str) -> None:
    for arm in PLAN.studies[study].arms:
        assert replace(typical(arm), small=SIZES["mini"]).config.model.d_model == 32


def test_no_registered_run_is_left_that_nobody_measures() -> None:
    uncovered = PLAN.list_uncovered()
    assert len(uncovered) <= MOST_LEFT_OUT
    for name in uncovered:
        experiment = next(one for one in EXPERIMENTS if one.name == name)
        assert PLAN.left_out[name], f"{name} has no reason in the plan"
        assert experiment.notes, f"{name} has no reason in its notes"


def test_random_seeds_change_the_frozen_library() -> None:
    arm = PLAN.arms["ladder/gravity-v4"]
    seeds = {Run(arm=arm, seed=seed, settings=TYPICAL).config.model.expert_seed for seed in arm.seeds}
    assert len(seeds) == 3


def test_each_side_is_tuned_among_three_rates_and_by_dropout_and_decay() -> None:
    for key in ("ladder", "frontier", "novels"):
        for arm in PLAN.studies[key].arms:
            if not arm.like:
                assert arm.grid is not None
                assert len(arm.grid["rates"]) >= 3
                assert len(arm.grid["dropout"]) >= 2
                assert len(arm.grid["decay"]) >= 2
                assert len(arm.seeds) == 3


def test_arms_have_names_of_their_own_in_the_records() -> None:
    places = [typical(arm).record for arm in PLAN.arms.values()]
    assert len(places) == len(set(places))


def do(plan: Plan, arm: Arm, records: dict[str, Record], losses: dict[str, float]) -> None:
    """Pretend that every run that is known by now was run; losses: by a part of the settings' name, else 3."""
    for run in plan.known_runs(arm, records):
        assert run.settings is not None
        name = run.settings.name
        loss = next((value for part, value in losses.items() if f"{part}_" in f"{name}_"), 3.0)
        records.setdefault(run.record, {"best_val_loss": loss, "test_loss": loss, "status": "finished"})


def test_tuning_tries_rates_then_dropout_then_decay_then_seeds() -> None:
    arm, records = PLAN.arms["ladder/gravity-v4"], dict[str, Record]()
    assert [run.settings for run in PLAN.known_runs(arm, records)] == [
        Settings(6e-4, 0.0, 0.1),
        Settings(1.2e-3, 0.0, 0.1),
        Settings(2.4e-3, 0.0, 0.1),
    ]
    do(PLAN, arm, records, {"r12": 2.0})
    assert {run.settings.dropout for run in PLAN.known_runs(arm, records) if run.settings} == {0.0, 0.1}
    assert PLAN.choose(arm, records) is None
    do(PLAN, arm, records, {"r12_d0.1": 1.9, "r12": 2.0})
    do(PLAN, arm, records, {"w1": 2.5})
    assert PLAN.choose(arm, records) == Settings(1.2e-3, 0.1, 0.1)
    runs = PLAN.known_runs(arm, records)
    assert [run.seed for run in runs if run.record not in records] == [1, 2]
    assert len(runs) == PLAN.count_runs(arm)


def test_a_best_rate_at_the_end_asks_for_one_beyond() -> None:
    arm, records = PLAN.arms["ladder/gravity-v4"], dict[str, Record]()
    do(PLAN, arm, records, {"r24": 2.0})
    assert 4.8e-3 in {run.settings.rate for run in PLAN.known_runs(arm, records) if run.settings}
    do(PLAN, arm, records, {"r48": 1.9})
    assert 9.6e-3 in {run.settings.rate for run in PLAN.known_runs(arm, records) if run.settings}
    do(PLAN, arm, records, {"r96": 1.8})
    assert 19.2e-3 not in {run.settings.rate for run in PLAN.known_runs(arm, records) if run.settings}, "twice at most"


def test_a_run_that_diverged_is_not_chosen_and_holds_nothing_up() -> None:
    arm, records = PLAN.arms["ladder/gravity-v4"], dict[str, Record]()
    known = PLAN.known_runs(arm, records)
    for run, loss in zip(known, (3.0, 2.0, None), strict=True):
        records[run.record] = {"status": "failed"} if loss is None else {"best_val_loss": loss}
    assert find_loss(records[known[2].record]) == float("inf")
    assert {run.settings.dropout for run in PLAN.known_runs(arm, records) if run.settings} == {0.0, 0.1}


def test_terms_wait_for_their_base_and_take_its_settings() -> None:
    arm, base, records = PLAN.arms["terms-trained/phoenix"], PLAN.arms["ladder/trained-gravity-16"], dict[str, Record]()
    assert PLAN.known_runs(arm, records) == []
    for _ in range(4):
        do(PLAN, base, records, {"r12_d0.2_w0.1": 2.0})
    assert [run.settings for run in PLAN.known_runs(arm, records)] == [Settings(1.2e-3, 0.2, 0.1)] * 3


def test_equal_seconds_are_known_once_both_were_timed() -> None:
    arm = PLAN.arms["frontier/dense-4096-longer"]
    assert PLAN.known_runs(arm, {}) == []
    timed = {
        "studies/timing/some-candidate-seed0.json": {"seconds": 3.0, "steps": 300},
        "studies/timing/dense-4096-seed0.json": {"seconds": 1.5, "steps": 300},
    }
    assert {run.config.train.epochs for run in PLAN.known_runs(arm, timed)} == {8}  # twice the four passes


def test_costs_are_those_that_were_measured_within_a_quarter() -> None:
    # benchmarks/RESULTS.md: 14.3, 22.8, 38.1 and 28.5 ms a step of 32 rows of 768.
    for name, ms in (("A1", 14.3), ("A4", 22.8), ("A6", 38.1), ("B3", 28.5)):
        cost = estimate(Run(arm=PLAN.arms[f"published/{name}"], seed=0))
        assert cost.gpu_seconds / cost.steps * 1e3 == pytest.approx(ms, rel=0.25)


def test_minutes_fall_as_runs_are_done() -> None:
    study = PLAN.studies["published"]
    total, done, seconds = foretell(PLAN, study, {})
    run = Run(arm=study.arms[0], seed=0)
    fewer = foretell(PLAN, study, {run.record: {}})
    assert (total, done) == (fewer[0], fewer[1] - 1)
    assert minutes_of(fewer[0] - fewer[1], fewer[2], WORKERS) < minutes_of(total - done, seconds, WORKERS)


# --- records --------------------------------------------------------------------------------------------------


def test_records_come_home_as_they_were(tmp_path: Path) -> None:
    records = {"studies/ladder/a-seed0.json": {"test_loss": 2.5, "stories": {"test": {"nats": [1.0], "tokens": [2]}}}}
    (tmp_path / HOME).write_bytes(pack(records))
    assert unpack(tmp_path / HOME) == records
    assert take(tmp_path / HOME, tmp_path / "results") == (["studies/ladder/a-seed0.json"], [])
    assert json.loads((tmp_path / "results/studies/ladder/a-seed0.json").read_text()) == next(iter(records.values()))
    assert take(tmp_path / HOME, tmp_path / "results") == ([], ["studies/ladder/a-seed0.json"])


@pytest.mark.parametrize("place", ["../a.json", "studies/../../a.json", "/studies/a.json", "audit/a.json", "studies/a"])
def test_a_record_from_elsewhere_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / HOME).write_bytes(pack({place: {}}))
    with pytest.raises(ConfigError, match="something else than records"):
        take(tmp_path / HOME, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_file_that_holds_no_records_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / HOME).write_bytes(b"nothing")
    assert main(["take", str(tmp_path / HOME)]) == 2
    assert "holds no records" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--slice", "lader", "--data", "d", "--out", "o"], "did you mean 'ladder'?"),
        (["run", "--slice", "ladder", "--data", "d", "--out", "o", "--workers", "0"], "use 1 or more"),
        (["run", "--slice", "ladder", "--data", "d", "--out", "o", "--size", "tiny"], "use full, mini"),
        (["data", "--from", "nowhere", "--out", "o"], "has no tinystories_train.jsonl"),
        (["frobnicate"], "is no verb"),
    ],
)
def test_bad_words_get_a_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_slim_record_keeps_losses_of_epochs_and_stories() -> None:
    record = {"epochs": [{"epoch": 1, "val_loss": 2.0, "layers": [1] * 99}], "stories": {"test": {}}, "layers": None}
    kept = slim(record)
    assert kept["stories"] == {"test": {}}
    assert kept["epochs"][0]["val_loss"] == 2.0
    assert "layers" not in kept["epochs"][0]


def test_texts_that_travel_are_packed_in_order(tmp_path: Path) -> None:
    for name in ("tinystories_train", "tinystories_more_train", "tinystories_more_valid", "tinystories_more_test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"One {name}."}) + "\n")
    (tmp_path / "domains").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / f"domains/novels_{split}.jsonl").write_text(json.dumps({"text": f"A novel {split}."}) + "\n")
    said: list[str] = []
    assert lay_out(tmp_path, tmp_path / "out", said.append) > 0
    assert said[0] == "tinystories, train: 2 documents"
    assert sorted(one.name for one in (tmp_path / "out/novels").iterdir()) == [
        "test.jsonl.gz",
        "train.jsonl.gz",
        "valid.jsonl.gz",
    ]


# --- intervals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("freedom", "point"), [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (1000, 1.962)])
def test_students_points_are_those_of_the_tables(freedom: float, point: float) -> None:
    assert student(freedom) == pytest.approx(point, abs=2e-3)


@pytest.mark.parametrize(
    ("of_seeds", "of_stories"), [(0.01, 0.0), (0.01, 0.05), (0.01, 0.12), (0.0, 0.3), (0.003, 0.05)]
)
def test_19_of_20_intervals_hold_the_truth_whatever_varies(of_seeds: float, of_stories: float) -> None:
    draw = np.random.default_rng(1)
    S, N, repeats, truth = 3, 80, 400, 0.02
    tokens = draw.integers(50, 350, N).astype(float)
    held = 0
    for _ in range(repeats):
        a, b = draw.normal(0, of_seeds, (S, 1)), draw.normal(0, of_stories, (1, N))
        found = crossed((truth + a + b + draw.normal(0, 0.05, (S, N))) * tokens, tokens)
        assert found.half is not None
        held += abs(found.mean - truth) <= found.half
    assert 0.92 <= held / repeats <= 0.985  # 0.95, and 2.2 standard errors of 400 repeats


def test_an_interval_of_seeds_alone_would_miss_the_stories() -> None:
    draw = np.random.default_rng(2)
    tokens = np.full(60, 100.0)
    nats = (2.0 + draw.normal(0, 0.5, (1, 60)) + draw.normal(0, 0.001, (3, 60))) * tokens
    both, seeds = crossed(nats, tokens), over_seeds(list(nats.sum(1) / tokens.sum()))
    assert both.half is not None
    assert seeds.half is not None
    assert both.half > 20 * seeds.half


def test_pairing_by_story_takes_out_what_stories_have_in_common() -> None:
    draw = np.random.default_rng(3)
    tokens = draw.integers(50, 350, 200).astype(float)
    common = draw.normal(2.5, 0.4, (1, 200))
    one, other = ((common + shift + draw.normal(0, 0.02, (3, 200))) * tokens for shift in (0.0, 0.03))
    gap, alone = difference(one, other, tokens), crossed(one, tokens)
    assert gap.mean == pytest.approx(-0.03, abs=0.01)
    assert gap.is_apart
    assert gap.half is not None
    assert alone.half is not None
    assert gap.half < alone.half / 5


def test_a_mean_counts_tokens_and_not_stories() -> None:
    assert crossed(np.array([[10.0, 300.0], [10.0, 300.0]]), np.array([10.0, 100.0])).mean == pytest.approx(310 / 110)


def test_one_seed_tells_no_interval() -> None:
    found = crossed(np.ones((1, 5)), np.ones(5))
    assert found.half is None
    assert not found.is_apart


# --- pages ----------------------------------------------------------------------------------------------------


def make_up(losses: dict[str, float], seeds: tuple[int, ...] = (0, 1, 2)) -> dict[str, Record]:
    """Records of arms with these losses, tuned and whole, each story a little different."""
    draw = np.random.default_rng(0)
    records: dict[str, Record] = {}
    common = draw.normal(0, 0.3, 40)
    for key, loss in losses.items():
        for _ in range(5):
            for run in PLAN.known_runs(PLAN.arms[key], records):
                if run.seed not in seeds or run.record in records:
                    continue
                tokens = np.full(40, 200)
                nats = (loss + common + draw.normal(0, 0.01, 40)) * tokens
                parts = [] if run.settings is None else run.settings.name.split("_")
                worse = 0.2 * len(set(parts) - {"r12", "d0.1", "w0.1"})
                records[run.record] = {
                    "experiment": run.arm.experiment, "seed": run.seed, "status": "finished",
                    "best_val_loss": loss + worse, "test_loss": float(nats.sum() / tokens.sum()),
                    "trainable_parameters": 16_000_000, "tokens": 9_000_000, "seconds": 30.0, "steps": 1872,
                    "middle_layer": 0, "layers": [{"layer": 0, "gini": 0.4}], "device": "none", "commit": "none",
                    "stories": {"test": {"nats": nats.round(2).tolist(), "tokens": tokens.tolist()}},
                }  # fmt: skip
    return records


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for pages, with the predictions."""
    (tmp_path / "docs/studies").mkdir(parents=True)
    (tmp_path / "docs/studies/predictions.md").write_text("## ladder\n\nWe expect nothing.\n")
    return tmp_path


def write_all(records: dict[str, Record], results: Path) -> None:
    for name, record in records.items():
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(json.dumps(record))


def test_pages_without_records_say_so(place: Path) -> None:
    made = {path.name: text.decode() for path, text in make_pages(place / "results", place / "docs/studies").items()}
    assert set(made) == {"published.md", "ladder.md", "gravity.md", "depth.md", "frontier.md", "laptop.md", "README.md"}
    assert "Not measured yet: 140 runs are planned, none is in." in made["ladder.md"]
    assert "We expect nothing." in made["ladder.md"]
    for name in made.keys() - {"README.md"}:
        assert "## Verdict" in made[name]
    assert made["README.md"].count("not measured yet") > 50


def test_pages_show_intervals_and_judge_statements(place: Path) -> None:
    losses = {"ladder/gravity-v4": 2.75, "ladder/frozen-keys": 2.745, "ladder/dense-equal-trainable": 2.5}
    write_all(make_up(losses), place / "results")
    made = {path.name: text.decode() for path, text in make_pages(place / "results", place / "docs/studies").items()}
    row = next(line for line in made["ladder.md"].splitlines() if line.startswith("| `dense-equal-trainable`"))
    assert "±" in row
    assert "| -0.2" in row
    assert "` * |" not in row, "all of its runs are in"
    assert "study-ladder-difference.svg" in made
    assert "Not measured yet: " in made["ladder.md"]
    verdicts = made["README.md"].splitlines()
    assert any("same trained parameters" in line and line.endswith("| holds | not measured yet |") for line in verdicts)
    assert any("how the keys move" in line and "holds (within 0.03)" in line for line in verdicts)


def test_what_a_laptop_says_stands_beside_and_is_no_verdict(place: Path) -> None:
    write_all(make_up({"laptop/gravity-v4": 3.3, "laptop/dense-equal-trainable": 3.0}), place / "results")
    made = {path.name: text.decode() for path, text in make_pages(place / "results", place / "docs/studies").items()}
    row = next(line for line in made["README.md"].splitlines() if "same trained parameters" in line)
    *_, verdict, laptop, _ = (cell.strip() for cell in row.split("|"))
    assert verdict == "not measured yet"
    assert float(laptop.split()[0]) == pytest.approx(-0.3, abs=0.01)
    assert laptop.endswith(": holds")


def test_one_seed_is_a_lead_and_no_verdict(place: Path) -> None:
    write_all(make_up({"ladder/gravity-v4": 2.75, "ladder/frozen-keys": 2.7}, seeds=(0,)), place / "results")
    made = {path.name: text.decode() for path, text in make_pages(place / "results", place / "docs/studies").items()}
    assert "one seed: a lead" in made["README.md"]
    assert "Runs of it are open" in made["ladder.md"]


def test_open_tuning_shows_the_best_so_far() -> None:
    arm = PLAN.arms["ladder/gravity-v4"]
    first, second, _ = PLAN.known_runs(arm, {})
    records = {
        first.record: {"best_val_loss": 2.0, "test_loss": 2.1},
        second.record: {"best_val_loss": 1.9, "test_loss": 2.0},
    }
    found = Outcomes(PLAN, records)["ladder/gravity-v4"]
    assert found.settings == second.settings
    assert not found.is_whole


def test_the_pages_in_the_docs_show_the_results(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["pages", "--check"]) == 0, capsys.readouterr().err


# --- the rehearsal --------------------------------------------------------------------------------------------


def write_texts(place: Path) -> None:
    draw, words = Random(0), [*"abcdefghijklmnop", "the", "cat", "sat", "under", "Lily", "Tom"]
    for folder in ("tinystories", "novels"):
        (place / folder).mkdir(parents=True)
        for split, count in (("train", 120), ("valid", 16), ("test", 16)):
            texts = [" ".join(draw.choices(words, k=draw.randint(30, 60))) for _ in range(count)]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (place / folder / f"{split}.jsonl").write_text(lines)


def test_no_run_is_begun_that_would_not_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.studies import runner

    write_texts(tmp_path / "data")
    begun: list[str] = []

    def pretend(self: Any, turn: Any) -> None:  # noqa: ARG001
        begun.append(turn.job.name)
        turn.state, turn.reason = "failed", "the loss became nan at step 3"

    monkeypatch.setattr(runner.Slice, "_run_job", pretend)
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"data": tmp_path / "data", "records": {}, "workers": 2, "small": SIZES["mini"]}
    options |= {"say": lambda _: None}
    study = PLAN.studies["ladder"]
    none = runner.run_slice(PLAN, study, out=tmp_path / "a", work=tmp_path / "b", minutes=0.1, **options)
    assert (begun, none.new) == ([], {})
    some = runner.run_slice(PLAN, study, out=tmp_path / "c", work=tmp_path / "d", minutes=5, most=4, **options)
    assert len(begun) == 4
    records = unpack(tmp_path / "c" / HOME)
    assert {record["status"] for record in records.values()} == {"failed"}, "a rate too high is a finding too"
    assert some.new == records


def test_where_the_first_runs_all_fail_no_more_are_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.studies import runner

    write_texts(tmp_path / "data")

    def pretend(self: Any, turn: Any) -> None:  # noqa: ARG001
        turn.state, turn.reason = "failed", "no kernel"

    monkeypatch.setattr(runner.Slice, "_run_job", pretend)
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    places: dict[str, Any] = {name: tmp_path / name for name in ("data", "out", "work")}
    study, said = PLAN.studies["ladder"], []
    found = runner.run_slice(
        PLAN, study, **places, records={}, minutes=9, workers=2, small=SIZES["mini"], say=said.append
    )
    assert len(found.turns) <= runner.HOPELESS + 1  # the other worker's, that had begun
    assert "the first runs all failed" in said[-1]


def test_a_slice_that_is_done_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = PLAN.studies["lengths"]
    records = {run.record: {"test_loss": 2.0} for arm in study.arms for run in PLAN.known_runs(arm, {})}
    write_all(records, tmp_path / "results")
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    assert main(["run", "--slice", "lengths", *words]) == 2
    assert "is done" in capsys.readouterr().err


@pytest.mark.parametrize(("script", "shares"), [("exit 0", True), ("exit 1", False)])
def test_runs_share_the_chip_where_that_can_be_had(
    script: str, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.studies import runner

    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    control = tmp_path / runner.MPS
    control.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/told\n{script}\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with runner.sharing(tmp_path, lambda _: None, wanted=True):
        assert ("CUDA_MPS_PIPE_DIRECTORY" in os.environ) is shares
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert (tmp_path / "told").read_text().startswith("-d")


def test_the_runner_needs_nothing_that_draws() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import tools.studies.__main__, tools.studies.runner"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_the_ladder_goes_from_run_to_page(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_from_run_to_page("ladder", place, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("study", [study for study in PLAN.studies if study != "ladder"])
def test_every_slice_goes_from_run_to_page(study: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_from_run_to_page(study, place, monkeypatch)


def go_from_run_to_page(study: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(place / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_texts(place / "data")
    results = place / "results"
    if PLAN.studies[study].base:  # which waits for its base
        write_all(make_up({next(arm.like for arm in PLAN.studies[study].arms): 2.5}), results)
    words = ["--data", str(place / "data"), "--out", str(place / "out"), "--results", str(results), "--work"]
    run = ["run", "--slice", study, *words, str(place / "work"), "--minutes", "30", "--workers", "2", "--size", "mini"]
    assert main([*run, "--most", "2"]) == 0
    home = unpack(place / "out" / HOME)
    assert len(home) == 2
    for record in home.values():
        assert record["status"] == "finished"
        assert record["test_loss"] > 0
        assert len(record["stories"]["test"]["nats"]) == 16
    assert not any((place / "work").glob("*-seed*")), "a run folder is gone when its record is written"
    assert main(["take", str(place / "out" / HOME), "--results", str(results)]) == 0
    pages = make_pages(results, place / "docs/studies")
    assert any(next(iter(home.values()))["device"].encode() in text for text in pages.values()) or study in (
        "published",
        "registered",
        "timing",
        "lengths",
    )


@pytest.mark.slow
@pytest.mark.parametrize("study", PLAN.studies)
def test_every_planned_run_trains(study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import some_moe

    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    write_texts(tmp_path / "data")
    least = {"train.max_steps": 2, "data.val_subset_size": 2, "data.batch_size": 4, "train.checkpoints": "weights"}
    for arm in PLAN.studies[study].arms:
        job = replace(typical(arm), small=SIZES["mini"] | least).make_job(tmp_path / "data")
        run = some_moe.train(job.config, out=tmp_path / arm.name, display=False)
        assert run.result is not None
        assert run.result["test_loss"] > 0, arm.key
        shutil.rmtree(tmp_path / arm.name)
