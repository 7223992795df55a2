"""Published against measured: what is read, what is compared with what, and what is said of it."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from some_moe.cli import main
from some_moe.config import ConfigError
from some_moe.lab.published import (
    NO_TOLERANCE,
    NOT_MEASURED,
    NOT_PUBLISHED,
    OUTSIDE,
    WITHIN,
    Comparison,
    Spread,
    compare_results,
    judge,
    read_results,
)
from some_moe.lab.published_tables import format_comparisons, list_notes
from some_moe.lab.registry import find_experiment
from some_moe.lab.registry.tolerances import TOLERANCES, Tolerance, find_tolerance
from some_moe.layout import Style

MakeUp = Callable[..., Path]


def compare(path: Path, *names: str) -> dict[str, Comparison]:
    results, _ = read_results(path.parent)
    return {comparison.name: comparison for comparison in compare_results(results, names)}


# --- tolerances -----------------------------------------------------------------------------------------------


def test_tolerances_are_nats_for_a_and_b_and_a_share_for_v() -> None:
    assert str(find_tolerance(find_experiment("A1"))) == str(find_tolerance(find_experiment("B3"))) == "±0.06 nats"
    assert str(find_tolerance(find_experiment("V8"))) == "±10 %"
    assert find_tolerance(find_experiment("mvp-v2")) is find_tolerance(find_experiment("v5-mlp")) is None
    assert Tolerance(share=Decimal("0.10")).allow(Decimal("2.0542")) == Decimal("0.20542")


def test_every_tolerance_names_a_series() -> None:
    assert set(TOLERANCES) <= {find_experiment(name).series for name in ("V1", "A1", "B1")}


@pytest.mark.parametrize(
    ("name", "loss", "verdict"),
    [
        ("A1", 0.8229, WITHIN),  # published 0.7629: exactly 0.06 away
        ("A1", 0.82291, OUTSIDE),
        ("A1", 0.7029, WITHIN),
        ("A1", 0.70289, OUTSIDE),
        ("V2", 2.49491, WITHIN),  # published 2.2681: exactly a tenth away
        ("V2", 2.49492, OUTSIDE),
        ("mvp-v6", 2.2723, NO_TOLERANCE),
        ("v5-linear", 2.8337, NO_TOLERANCE),
        ("frozen-keys", 0.7629, NOT_PUBLISHED),
    ],
)
def test_a_loss_is_judged_by_its_distance(make_up: MakeUp, name: str, loss: float, verdict: str) -> None:
    assert compare(make_up(name, loss=loss))[name].verdict == verdict


# --- what is compared with what -------------------------------------------------------------------------------


def test_padded_reports_are_met_with_the_padded_loss_and_later_ones_with_real_tokens(make_up: MakeUp) -> None:
    a1, v5 = compare(make_up("A1", loss=0.75))["A1"], compare(make_up("v5-mlp", loss=2.8))["v5-mlp"]
    assert a1.loss == Spread((0.75,))
    assert a1.measured["val_loss"] == Spread((2.75,))
    assert a1.difference == Decimal("-0.0129")
    assert v5.loss == Spread((2.8,))
    assert "val_loss_padded" not in v5.measured


def test_gini_is_of_all_positions_where_the_run_counts_padding(make_up: MakeUp) -> None:
    a1, v5 = compare(make_up("A1"))["A1"].measured, compare(make_up("v5-mlp"))["v5-mlp"].measured
    assert (a1["gini_all"].mean, a1["gini_real"].mean) == (0.7777, 0.5555)
    assert (a1["entropy_bits_all"].mean, a1["entropy_bits_real"].mean) == (4.4444, 5.5555)
    assert v5["gini_real"].mean == 0.7777
    assert "gini_all" not in v5
    other = compare(make_up("A2", overrides={"data.count_padding": False}))["A2"].measured
    assert "gini_all" not in other


def test_experts_are_counted_of_those_that_the_run_had(make_up: MakeUp) -> None:
    assert compare(make_up("A1"))["A1"].measured["num_experts"] == Spread((64,))
    fewer = compare(make_up("A2", overrides={"model.num_experts": 48}))["A2"]
    assert fewer.measured["num_experts"] == fewer.epochs[0].measured["num_experts"] == Spread((48,))


def test_epochs_stand_beside_the_epochs_of_the_report(make_up: MakeUp) -> None:
    v1 = compare(make_up("V1", loss=2.5))["V1"]
    assert [point.epoch for point in v1.epochs] == [1, 2, 3, 4]
    assert [point.verdict for point in v1.epochs] == [WITHIN, NOT_PUBLISHED, NOT_PUBLISHED, WITHIN]
    assert v1.epochs[0].published["gini"] == Decimal("0.631")
    assert v1.epochs[0].loss is not None
    assert math.isclose(v1.epochs[0].loss.mean, 2.8)


def test_epochs_of_other_data_are_not_taken_for_published_ones(make_up: MakeUp) -> None:
    own = [{"epoch": 1, "step": 80, "val_loss_padded": 9.9}]
    plain = compare(make_up("A1", published_epochs=None, epochs=own, epochs_scaled=None))["A1"]
    assert plain.epochs[0].loss == Spread((9.9,))
    scaled = compare(make_up("A1", published_epochs=None, epochs=own, epochs_scaled={"epochs": 5.8}))["A1"]
    assert [point.verdict for point in scaled.epochs] == [NOT_MEASURED] * 3 + [OUTSIDE]
    assert scaled.epochs[-1].loss == Spread((1.1111,)), "the end of the run is the end of its last epoch"


def test_seeds_are_taken_together(make_up: MakeUp) -> None:
    for seed, loss in enumerate((0.70, 0.75, 0.80)):
        path = make_up("A1", seed, loss=loss)
    final = compare(path)["A1"]
    assert final.loss is not None
    assert final.loss.to_dict() == {
        "mean": pytest.approx(0.75), "stdev": pytest.approx(0.05), "low": 0.70, "high": 0.80,
        "values": [0.70, 0.75, 0.80],
    }  # fmt: skip
    assert final.verdict == WITHIN


def test_judgements_name_the_epochs_that_are_not_like_the_others(make_up: MakeUp) -> None:
    make_up("A1", loss=0.7629)  # epochs 1 and 2 are farther away
    path = make_up("A6", loss=0.7)
    found = judge(compare(path).values())
    assert found[WITHIN] == {"A1": [4]}
    assert found[OUTSIDE] == {"A1": [1, 2, 3], "A6": []}
    assert found[NOT_MEASURED]["B1"] == []
    assert found[NOT_PUBLISHED] == {}


def test_the_end_is_judged_where_no_epoch_was_published(make_up: MakeUp) -> None:
    judged = judge(compare(make_up("v2-professional"), "v2-professional").values())
    assert judged[NO_TOLERANCE] == {"v2-professional": []}


# --- what is read ---------------------------------------------------------------------------------------------


def test_absent_fields_leave_gaps_and_nothing_else(make_up: MakeUp) -> None:
    path = make_up("A1")
    path.write_text("{}")  # the name of the file says which run it is
    damaged = {"val_loss": float("nan"), "layers": 3, "epochs": ["x"], "overrides": 3, "epochs_scaled": {"epochs": "x"}}
    (path.parent / "A2-seed7.json").write_text(json.dumps(damaged))
    found = compare(path)
    assert found["A1"].results[0].seed == 0
    assert found["A2"].results[0].seed == 7
    assert found["A1"].verdict == found["A2"].verdict == NOT_MEASURED
    assert found["A2"].measured == {}
    text = format_comparisons(list(found.values()), (), every_epoch=True, width=80, style=Style())
    assert "A2-seed7.json 1,248" in " ".join(text.split()), "all that is known of it is how many steps were published"
    assert "published, not measured yet" in text


def test_a_run_without_usage_has_gaps_beside_one_with_it(make_up: MakeUp) -> None:
    make_up("A1")
    path = make_up("A2", layers=None, published_epochs=None)
    text = format_comparisons(list(compare(path, "A").values()), (), every_epoch=False, width=80, style=Style())
    words = " ".join(text.split())
    assert "A1 64 44 64 A2 64 – –" in words


def test_files_that_are_no_results_are_left_out_by_name(make_up: MakeUp) -> None:
    path = make_up("A1")
    (path.parent / "notes.json").write_text("[1]")
    (path.parent / "demo-seed0.json").write_text('{"experiment": null}')
    results, left_out = read_results(path.parent)
    assert [result.file.name for result in results] == ["A1-seed0.json"]
    assert left_out == ["demo-seed0.json", "notes.json"]


def test_two_files_of_one_run_are_refused(make_up: MakeUp) -> None:
    make_up("A1", file="A1-copy.json")
    path = make_up("A1")
    with pytest.raises(ConfigError, match=r"^A1-copy.json and A1-seed0.json both hold A1 with seed 0; keep one of"):
        read_results(path.parent)


def test_notes_say_where_a_run_is_not_the_published_one(make_up: MakeUp) -> None:
    scaled = {"stories": 700, "published_stories": 10000, "epochs": 5.8125, "published_epochs": 4}
    make_up("A1", 0, epochs_scaled=scaled, steps=1248, stories={"valid": 40})
    make_up("A1", 1, status="stopped early", steps=1248, total_parameters=5, source="sample")
    path = make_up("A2", steps=1248, overrides={"model.top_k": 2, "train.precision": "float32"})
    assert list_notes(compare(path).values()) == [
        "A1 (seed 0): 700 training stories instead of 10,000, read 5.81 times instead of 4, so that the steps are as "
        "many.",
        "A1 (seed 0): validated on 40 stories instead of 2,000.",
        "A1 (seed 1): stopped early.",
        "A1 (seed 1): trained on sample, where hf:roneneldan/TinyStories is registered.",
        "A1 (seed 1): its model has 5 parameters, the registered one 419,144,704.",
        "A2: with changed settings: model.top_k 2.",
    ]


# --- the command ----------------------------------------------------------------------------------------------


@pytest.fixture
def here(make_up: MakeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with made-up results of four runs, in which the commands run."""
    for seed in range(3):
        make_up("A1", seed, loss=0.75 + 0.01 * seed)
    for name, loss in (("A6", 0.7), ("V1", 2.5), ("frozen-keys", 0.8)):
        make_up(name, loss=loss)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_compare_prints_each_convention_and_the_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "compare"]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    for fragment in (
        "A1 0.7629 0.7600 ± 0.0100 -0.0029 within",
        "A6 1.9682 0.7000 -1.2682 outside",
        "A2 0.7259 – – not measured",
        "A1 0.7912 0.778 ± 0.000 0.555 ± 0.000",
        "V1 2.5555 2.5000 -0.0555 (-2.2%) within",
        "A6 1,117,356,032 1117.36 42,041,344 42.04",
        "A1-seed2.json 400 1,248 45,679 12.3 a made-up device",
        "outside the tolerance: A1 (epochs 1, 2, 3); A6",
        "measured, not published: V1 (epochs 2, 3); frozen-keys",
        "some experiments compare NAME` shows every epoch",
    ):
        assert fragment in words, fragment
    assert "epoch  published" not in text


@pytest.mark.usefixtures("here")
def test_compare_by_name_prints_every_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "compare", "v1"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "V1 1 2.8422 2.8000 -0.0422 (-1.5%) within V1 2 – 2.7000 – not published" in words
    assert "A6" not in words
    assert main(["experiments", "compare", "A"]) == 0
    assert "A6 end 1.9682 0.7000" in " ".join(capsys.readouterr().out.split())


def test_results_at_published_sizes_stand_in_the_place_of_older_ones(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = here / "results" / "published"
    folder.mkdir()
    (here / "results" / "A1-seed2.json").rename(folder / "A1-seed2.json")
    assert main(["experiments", "compare"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "A1 0.7629 0.7700 +0.0071 within" in words  # that one alone
    assert "A6 1.9682 0.7000 -1.2682 outside" in words  # as before


@pytest.mark.usefixtures("here")
def test_compare_fits_eighty_columns() -> None:
    results, _ = read_results(Path("results"))
    text = format_comparisons(compare_results(results), (), every_epoch=False, width=80, style=Style())
    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.usefixtures("here")
def test_compare_json_holds_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "compare", "A1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runs"]
    assert run["published_total_parameters_millions"] == 419.14
    assert run["loss"] == "val_loss_padded"
    assert run["tolerance"] == "±0.06 nats"
    assert [point["epoch"] for point in run["epochs"]] == [1, 2, 3, 4]
    assert run["final"]["published"]["gini"] == 0.7912
    assert run["final"]["measured"]["val_loss"]["values"] == pytest.approx([2.75, 2.76, 2.77])
    assert run["final"]["measured"]["perplexity_padded"]["mean"] == pytest.approx(math.exp(0.76), rel=1e-3)
    assert [result["seed"] for result in run["results"]] == [0, 1, 2]
    assert found["verdicts"][WITHIN] == [{"run": "A1", "epochs": [4]}]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--results", "nowhere"],
         "there is no folder 'nowhere' with results; `some experiments run NAME` writes one, or name another with "
         "--results"),
        (["--results", "empty"], "'empty' holds no result of a registered experiment; `some experiments run NAME` "
         "writes one"),
        (["B1"], "no result of B1 is there; `some experiments run B1` makes it"),
        (["A11"], "'A11' is not a registered experiment; did you mean 'A1'?"),
    ],
)  # fmt: skip
def test_compare_refuses_in_one_sentence(
    here: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty").mkdir()
    before = sorted(here.rglob("*"))
    assert main(["experiments", "compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"some: {sentence}\n"
    assert captured.out == ""
    assert sorted(here.rglob("*")) == before


def test_a_broken_file_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "results" / "A2-seed0.json").write_text('{"steps": ')
    assert main(["experiments", "compare"]) == 2
    assert "'results/A2-seed0.json' cannot be read" in capsys.readouterr().err


def test_compare_imports_nothing_heavy(here: Path) -> None:
    script = (
        "import sys; from some_moe.cli import main; main(['experiments', 'compare']); "
        "sys.exit(' '.join({'torch', 'numpy', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=here)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("every_epoch", [False, True])
def test_what_is_printed_fits_a_narrow_terminal(every_epoch: bool) -> None:
    results, _ = read_results(Path(__file__).parents[2] / "results")
    comparisons = compare_results(results, ["A"])
    text = format_comparisons(comparisons, [], every_epoch=every_epoch, width=80, style=Style())
    assert max(map(len, text.splitlines())) <= 80
