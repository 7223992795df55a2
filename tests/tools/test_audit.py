"""docs/audit.md: its prose stays, its tables are those of the results, and what is not measured is said."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from some_moe.config import ConfigError
from some_moe.lab.published import read_results
from some_moe.lab.registry import find_experiment
from tools.audit import MARKER, fill_audit
from tools.audit_evidence import Evidence, read_lengths
from tools.audit_tables import TABLES
from tools.documents import main

MakeUp = Callable[..., Path]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a table from the results there are."""

    def write(name: str) -> str:
        folder = tmp_path / "results"
        return TABLES[name](Evidence(results=read_results(folder)[0], lengths=read_lengths(folder / "audit")))

    return write


def write_lengths(folder: Path, run: str, seed: int = 0, *, split: str = "valid", **fields: Any) -> Path:
    """Write what `some eval RUN --seq-lens 256,768 --json` would print."""
    figures = {"loss": 2.8, "loss_on_padding": 0.0, "constant_loss": 5.9, "gini": 0.5, "gini_padded": 0.8} | fields
    rows = [
        {"seq_len": 256, "text_share": 0.75, "loss_padded": 2.1, "constant_loss_padded": 4.5, **figures},
        {"seq_len": 768, "text_share": 0.25, "loss_padded": 0.7, "constant_loss_padded": 2.1, **figures},
    ]
    path = folder / "results" / "audit" / f"lengths-{run}-{split}-seed{seed}.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({"experiment": run, "split": split, "seed": seed, "lengths": rows}))
    return path


Figure = float | tuple[float, ...] | str | None


def read_figure(cell: str) -> Figure:
    """What a cell holds: a number, several ("0.71 ± 0.01", "44 of 64"), words, or None for a dash."""
    numbers = tuple(float(found.replace(",", "")) for found in re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", cell))
    if re.sub(r"[-+\d.,%()±\s]|\b(of|and)\b", "", cell):
        return None if cell == "–" else cell
    return numbers[0] if len(numbers) == 1 else numbers


def read_rows(text: str) -> list[dict[str, Figure]]:
    """The rows of a Markdown table, by header."""
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.split("\n\n")[0].splitlines()]
    return [dict(zip(table[0], map(read_figure, row), strict=True)) for row in table[2:]]


def read_runs(text: str, name: str = "run") -> dict[Figure, dict[str, Figure]]:
    """The rows by the cell that names them, in their order."""
    return {row.pop(name): row for row in read_rows(text)}


def test_a_cell_is_read_as_its_numbers() -> None:
    cells = ("1,248", "0.7100 ± 0.0141", "44.0 ± 0.0 of 64", "-0.3305 (-12.9%)", "3 and 2", "–", "A4", "+0.0100")
    expected = [1248, (0.71, 0.0141), (44, 0, 64), (-0.3305, -12.9), (3, 2), None, "A4", 0.01]
    assert [read_figure(cell) for cell in cells] == expected


# --- each table -----------------------------------------------------------------------------------------------


def test_context_divides_the_published_loss_by_the_share_of_text(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("V2", loss=2.2, text_share=0.72)
    for seed in range(2):
        make_up("V8", seed, loss=1.2 + 0.02 * seed, text_share=0.386)
    text = read("context")
    runs = read_runs(text)
    assert list(runs) == ["V2", "V8"]
    assert runs["V2"] == {
        "seq\\_len": 256, "batch": 128, "share of text": 0.72, "published loss": 2.2681,
        "published ÷ share of text": 3.1501, "padded loss": 2.2, "honest loss": 4.2, "bits per byte": 0.9999,
        "seeds": 1,
    }  # fmt: skip
    assert runs["V8"] == {
        "seq\\_len": 512, "batch": 128, "share of text": 0.386, "published loss": 1.2117,
        "published ÷ share of text": 3.1391, "padded loss": (1.21, 0.0141), "honest loss": (3.21, 0.0141),
        "bits per byte": (0.9999, 0), "seeds": 2,
    }  # fmt: skip
    assert text.endswith("\n\nNot measured yet: V7.")


def test_lengths_stand_in_the_order_of_the_registry_with_their_seeds_together(
    make_up: MakeUp, tmp_path: Path, read: Callable[[str], str]
) -> None:
    make_up("A1")
    write_lengths(tmp_path, "A1", 0, loss=2.8)
    write_lengths(tmp_path, "A1", 1, loss=2.9)
    write_lengths(tmp_path, "V2", split="test")
    rows = read_rows(read("lengths"))
    assert [(row["run"], row["split"], row["seq\\_len"], row["seeds"]) for row in rows] == [
        ("V2", "test", 256, 1), ("V2", "test", 768, 1), ("A1", "valid", 256, 2), ("A1", "valid", 768, 2),
    ]  # fmt: skip
    assert [row["share of text"] for row in rows] == [0.75, 0.25] * 2
    assert [row["padded loss"] for row in rows] == [2.1, 0.7, (2.1, 0), (0.7, 0)]
    assert [row["honest loss"] for row in rows] == [2.8, 2.8, (2.85, 0.0707), (2.85, 0.0707)]
    assert [row["constant predictor, padded"] for row in rows] == [4.5, 2.1] * 2
    assert [row["constant predictor, honest"] for row in rows] == [5.9] * 4
    assert [row["gini, padding counted"] for row in rows] == [0.8, 0.8, (0.8, 0), (0.8, 0)]
    assert [row["gini, real tokens"] for row in rows] == [0.5, 0.5, (0.5, 0), (0.5, 0)]


def test_gini_and_entropy_are_shown_with_padding_and_without(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("V7", epochs=[{"epoch": 1, "train_experts_used": 64}, {"epoch": 2, "train_experts_used": 50}])
    make_up("A1", epochs=[{"epoch": 1, "train_experts_used": 64}])
    text = read("gini")
    runs = read_runs(text)
    assert list(runs) == ["A1", "V7"]
    counted = {
        "gini, padding counted": 0.7777, "gini, real tokens": 0.5555, "entropy, padding counted": 4.4444,
        "entropy, real tokens": 5.5555, "experts used": (44, 64),
        "chosen in the first pass of training": 64, "seeds": 1,
    }  # fmt: skip
    assert runs["A1"] == {
        "published gini": 0.7912, "published entropy, bits": 4.0851, "published used": 64, **counted
    }  # fmt: skip
    assert runs["V7"] == {
        "published gini": 0.661, "published entropy, bits": 4.454, "published used": None, **counted
    }  # fmt: skip
    assert text.endswith("Not measured yet: A2, A3, A4, A5, A6, B1, B2, B3, V1, V2, V3, V4, V5, V6, V8, V9, V10.")


def test_pace_counts_the_rows_that_were_seen(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("V7", loss=1.1, steps=1248)
    for seed in range(2):
        make_up("V8", seed, loss=1.2, steps=624)
    assert read_runs(read("pace")) == {
        "V7": {
            "batch": 64, "steps": 1248, "rows seen": 79872, "published loss": 1.1134, "padded loss": 1.1,
            "honest loss": 3.1, "seeds": 1,
        },
        "V8": {
            "batch": 128, "steps": 624, "rows seen": 79872, "published loss": 1.2117, "padded loss": (1.2, 0),
            "honest loss": (3.2, 0), "seeds": 2,
        },
    }  # fmt: skip
    assert "Not measured yet: V7-half, V8-long." in read("pace")


def test_vocabulary_sets_bits_per_byte_beside_nats_per_token(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("V2", loss=2.2, bits_per_byte=1.05)
    make_up("V4", loss=2.1, bits_per_byte=1.06, data={"tokenizer": {"vocab_size": 12921}})
    assert read_runs(read("vocabulary")) == {
        "V2": {
            "vocabulary asked for": 8192, "ids of the tokenizer": None, "nats per token": 4.2, "bits per byte": 1.05,
            "padded loss": 2.2, "published loss": 2.2681, "seeds": 1,
        },
        "V4": {
            "vocabulary asked for": 16384, "ids of the tokenizer": 12921, "nats per token": 4.1,
            "bits per byte": 1.06, "padded loss": 2.1, "published loss": 2.2484, "seeds": 1,
        },
    }  # fmt: skip


def test_experts_shows_size_and_time(make_up: MakeUp, read: Callable[[str], str]) -> None:
    for seed in range(2):
        make_up("A4", seed, loss=0.7, seconds=10.0 + seed)
    make_up("B1", loss=0.8)
    text = read("experts")
    assert read_runs(text) == {
        "A4": {
            "experts": 64, "parameters": 701_496_320, "published loss": 0.7126, "padded loss": (0.7, 0),
            "honest loss": (2.7, 0), "gini, real tokens": (0.5555, 0), "experts used": (44, 0, 64),
            "seconds": (10.5, 0.7), "seeds": 2,
        },
        "B1": {
            "experts": 128, "parameters": 1_373_568_000, "published loss": 0.7602, "padded loss": 0.8,
            "honest loss": 2.8, "gini, real tokens": 0.5555, "experts used": (44, 128), "seconds": 12.3, "seeds": 1,
        },
    }  # fmt: skip
    assert text.endswith("\n\nNot measured yet: B2, B3.")


def test_spread_pools_all_seeds_and_counts_those_of_each_run(make_up: MakeUp, read: Callable[[str], str]) -> None:
    for seed, loss in enumerate((0.74, 0.76)):  # deviation 0.0141, one degree of freedom
        make_up("A1", seed, loss=loss)
    for seed, loss in enumerate((0.69, 0.70, 0.71)):  # deviation 0.01, two degrees
        make_up("A4", seed, loss=loss)
    make_up("A3", loss=0.76)
    make_up("A5", loss=0.73)
    pairs = read_runs(read("spread"), "runs")

    def column(header: str) -> dict[Figure, Figure]:
        return {name: row[header] for name, row in pairs.items()}

    assert column("published difference") == {"A3 − A1": -0.006, "A4 − A1": -0.0503, "A5 − A3": -0.0109}
    assert column("measured difference") == {"A3 − A1": 0.01, "A4 − A1": -0.05, "A5 − A3": -0.03}
    pooled = (0.0115, 3)  # √((1 · 0.0002 + 2 · 0.0001) / 3)
    assert set(column("deviation between seeds (degrees of freedom)").values()) == {pooled}
    # A standard error is 0.0115 · √(1/n + 1/m); what was published is of one seed each.
    assert column("published, in standard errors") == {"A3 − A1": 0.4, "A4 − A1": 3.1, "A5 − A3": 0.7}
    assert column("measured, in standard errors") == {"A3 − A1": 0.7, "A4 − A1": 4.7, "A5 − A3": 1.8}
    assert column("seeds") == {"A3 − A1": (1, 2), "A4 − A1": (3, 2), "A5 − A3": (1, 1)}
    assert "Not measured yet: V9, V8, V10, B1, B2, B3, A2." in read("spread")


def test_spread_without_any_second_seed_claims_no_deviation(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("A1", loss=0.75)
    make_up("A2", loss=0.72)
    assert read_rows(read("spread")) == [
        {"runs": "A2 − A1", "published difference": -0.037, "measured difference": -0.03, "seeds": (1, 1)}
    ]


def test_order_sorts_by_the_measured_loss(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("A1", loss=0.75)
    make_up("A2", loss=0.76)
    for seed in range(2):
        make_up("A4", seed, loss=0.70 + 0.02 * seed)
    text = read("order")
    rows = read_rows(text)
    assert [(row["place"], row["run"], row["published place"]) for row in rows] == [
        (1, "A4", 1), (2, "A1", 3), (3, "A2", 2)
    ]  # fmt: skip
    assert [row["padded loss"] for row in rows] == [(0.71, 0.0141), 0.75, 0.76]
    assert [row["published loss"] for row in rows] == [0.7126, 0.7629, 0.7259]
    assert [row["seeds"] for row in rows] == [2, 1, 1]
    assert text.endswith("\n\nNot measured yet: A3, A5.")


def test_mvp_compares_each_run_as_its_report_counts(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("mvp-v2", loss=1.9, text_share=0.72)
    make_up("v5-linear", loss=2.7, text_share=0.26)
    assert read_runs(read("mvp")) == {
        "mvp-v2": {
            "published loss": 0.3454, "published perplexity": 1.41, "loss as the report counts": 1.9,
            "honest loss": 3.9, "perplexity of the honest loss": 22.22, "share of text": 0.72, "seeds": 1,
        },
        "v5-linear": {
            "published loss": 2.8337, "published perplexity": 17.01, "loss as the report counts": 2.7,
            "honest loss": 2.7, "perplexity of the honest loss": 22.22, "share of text": 0.26, "seeds": 1,
        },
    }  # fmt: skip


def test_training_sets_the_losses_of_the_last_epoch_side_by_side(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("A1", loss=0.7)
    assert read_runs(read("training")) == {
        "A1": {
            "published training": 0.8061, "training here": 3.3333, "training, difference": 313.5,
            "published validation": 0.7629, "validation here": 0.7, "validation, difference": -8.2, "seeds": 1,
        },
    }  # fmt: skip


def test_course_has_a_loss_for_each_epoch_and_adds_respawns_up(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("v6-decay-fix", loss=2.7, layers=[{"layer": 0, "respawns": 4}, {"layer": 1, "respawns": 5}])
    make_up("v3.5-decay-fix", loss=0.7)
    runs = read_runs(read("course"))
    assert runs["v6-decay-fix"] == {
        "published loss": 2.6102, "after epoch 1": 3.0, "after epoch 2": 2.9, "after epoch 3": 2.8,
        "after epoch 4": 2.7, "respawns": 9, "seeds": 1,
    }  # fmt: skip
    assert (runs["v3.5-decay-fix"]["after epoch 3"], runs["v3.5-decay-fix"]["respawns"]) == (None, None)


def test_collapse_stands_between_the_published_run_and_a_constant_predictor(
    make_up: MakeUp, tmp_path: Path, read: Callable[[str], str]
) -> None:
    make_up("A6", loss=0.7, max_gradient_norm=12.5)
    make_up("A6-bare", loss=2.1)
    make_up("D1-beta-scale", loss=0.7)
    make_up("A5-8-heads")  # of another run
    write_lengths(tmp_path, "V2", constant_loss_padded=2.2)
    write_lengths(tmp_path, "A1", split="test", constant_loss_padded=2.3)
    write_lengths(tmp_path, "A1")
    text = read("collapse")
    runs = read_runs(text)
    constant = "constant predictor (on the valid rows of A1, 768 long)"
    assert list(runs) == ["A6, published", "A6", "D1-beta-scale", "A6-bare", constant]

    def told(name: str) -> dict[str, Figure]:
        return {header: figure for header, figure in runs[name].items() if figure is not None}

    def epochs(kind: str, *losses: float) -> dict[str, Figure]:
        return {f"epoch {number}, {kind}": loss for number, loss in enumerate(losses, 1)}

    measured = {
        **epochs("train", *[3.3333] * 4), "gini, padding counted": 0.7777, "gini, real tokens": 0.5555,
        "experts used": (44, 64), "seeds": 1,
    }  # fmt: skip
    assert told("A6, published") == {
        **epochs("train", 1.7008, 1.9732, 2.1349, 2.1309), **epochs("val", 1.4363, 1.973, 1.9679, 1.9682)
    }  # fmt: skip
    assert told("A6") == {
        "changed": "nothing", "honest loss": 2.7, "largest logged gradient norm": 12.5, **measured,
        **epochs("val", 1.0, 0.9, 0.8, 0.7),
    }  # fmt: skip
    assert told("D1-beta-scale") == {
        "changed": r"gravity.beta\_layer\_scale none → 8 × 1, 8 × 0.5", "honest loss": 2.7, **measured,
        **epochs("val", 1.0, 0.9, 0.8, 0.7),
    }  # fmt: skip
    assert told("A6-bare") == {
        "changed": "train.warmup 0.03 → 0, train.clip 1 → 0", "honest loss": 4.1, **measured,
        **epochs("val", 2.4, 2.3, 2.2, 2.1),
    }  # fmt: skip
    assert told(constant) == {"epoch 4, val": 2.1, "honest loss": 5.9}
    missing = text.splitlines()[-1]
    assert missing.startswith("Not measured yet: A6-sines, A6-dropout, D2-frozen-deep, D3-grounding, A6-8-heads, ")
    assert "constant" not in missing


def test_assumptions_judge_each_choice_by_the_published_loss_of_its_base(
    make_up: MakeUp, read: Callable[[str], str]
) -> None:
    make_up("V1", loss=2.225)
    make_up("V1-sines", loss=2.4116)
    make_up("B1", loss=0.6961)
    for seed in range(2):
        make_up("B1-sines", seed, loss=0.72 + 0.02 * seed)
    text = read("assumptions")
    runs = read_runs(text)
    assert list(runs) == ["V1", "V1-sines", "B1", "B1-sines"]
    v1 = {"published loss": 2.5555, "published gini": 0.55, "gini, padding counted": 0.7777, "seeds": 1}
    b1 = {"published loss": 0.7602, "published gini": 0.9143}
    assert runs["V1"] == {
        "padded loss": 2.225, "difference": (-0.3305, -12.9), "verdict": "outside", "honest loss": 4.225, **v1
    }  # fmt: skip
    assert runs["V1-sines"] == {
        "padded loss": 2.4116, "difference": (-0.1439, -5.6), "verdict": "within", "honest loss": 4.4116, **v1
    }  # fmt: skip
    assert runs["B1"] == {
        "padded loss": 0.6961, "difference": -0.0641, "verdict": "outside", "honest loss": 2.6961,
        "gini, padding counted": 0.7777, "seeds": 1, **b1,
    }  # fmt: skip
    assert runs["B1-sines"] == {
        "padded loss": (0.73, 0.0141), "difference": -0.0302, "verdict": "within", "honest loss": (2.73, 0.0141),
        "gini, padding counted": (0.7777, 0), "seeds": 2, **b1,
    }  # fmt: skip
    assert " 0.550 " in text, "what was printed stands digit for digit"
    missing = text.splitlines()[-1]
    assert missing.startswith("Not measured yet: V1-steady, V1-post-norm, V1-dropout, V2, ")


def test_collapse_names_the_constant_predictor_where_it_is_missing(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("A6")
    assert read("collapse").endswith(", the constant predictor in rows of 768 (`results/audit/lengths-*.json`).")


def test_cost_adds_up_every_result(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("V1", seconds=10.0, steps=600, tokens=3000)
    for seed in range(2):
        make_up("A1", seed, seconds=20.0, steps=1200, tokens=9000)
    text = read("cost")
    runs = read_runs(text, "series")
    assert list(runs.items()) == [
        ("V (v3)", {"runs": 1, "steps": 600, "seconds of training": 10, "real tokens per second": 300}),
        ("A (v4)", {"runs": 2, "steps": 2400, "seconds of training": 40, "real tokens per second": 450}),
        ("all", {"runs": 3, "steps": 3000, "seconds of training": 50, "real tokens per second": 420}),
    ]
    assert text.splitlines()[-1].startswith("Not measured yet: mvp-v2, ")


def test_cost_adds_nothing_up_that_a_result_leaves_open(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("A1", seconds=20.0, tokens=9000)
    make_up("A1", 1, seconds=None)
    assert list(read_rows(read("cost"))[0]) == ["series", "runs", "steps"]


# --- what is missing, or not as registered --------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_nothing_is_one_line_that_says_so(name: str) -> None:
    text = TABLES[name](Evidence())
    assert text.startswith("Not measured yet: ")
    assert "\n" not in text


def test_a_run_with_changed_settings_or_stopped_early_is_named(make_up: MakeUp, read: Callable[[str], str]) -> None:
    make_up("V2", overrides={"data.batch_size": 64, "train.compile": False})
    make_up("V4", 1, status="stopped early")
    assert read("vocabulary").splitlines()[-1] == (
        "Not as registered: V2 (seed 0): with changed settings: data.batch\\_size 64. V4 (seed 1): stopped early."
    )
    assert read_rows(read("context"))[0]["batch"] == 64, "the batch that was run"


def test_every_run_of_the_tables_is_registered() -> None:
    for name in TABLES:
        names = TABLES[name](Evidence()).removeprefix("Not measured yet: ").removesuffix(".")
        for run in names.split(", ") if name != "lengths" else ():
            assert find_experiment(run).name == run


@pytest.mark.parametrize(
    "contents",
    [
        "{",
        "[]",
        '{"experiment": "A1", "split": "valid", "seed": 0}',
        '{"experiment": null, "split": "valid", "seed": 0, "lengths": []}',
        '{"experiment": "A1", "split": "valid", "seed": 0, "lengths": [{"loss": 2.8}]}',
    ],
)
def test_a_file_that_is_no_record_of_lengths_is_refused(tmp_path: Path, contents: str) -> None:
    path = write_lengths(tmp_path, "A1")
    path.write_text(contents)
    with pytest.raises(ConfigError, match=r"lengths-A1-valid-seed0\.json' is not what `some eval RUN --seq-lens"):
        read_lengths(path.parent)


def test_one_seed_twice_is_refused(tmp_path: Path) -> None:
    path = write_lengths(tmp_path, "A1")
    path.with_name("lengths-again.json").write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=r"lengths-again\.json' holds A1 with seed 0 once more; keep one"):
        read_lengths(path.parent)


def test_records_of_lengths_have_the_fields_that_the_tables_read(tmp_path: Path) -> None:
    row = json.loads(write_lengths(tmp_path, "A1").read_text())["lengths"][0]
    (kept,) = (REPOSITORY / "results" / "audit").glob("lengths-A1-seed0.json")
    assert set(row) <= set(json.loads(kept.read_text())["lengths"][0])


# --- the document ---------------------------------------------------------------------------------------------

PROSE = """# Audit

Before 0.7629.

<!-- table order -->
old
<!-- end -->

After.

<!-- table cost --><!-- end -->
"""


def test_only_what_stands_between_markers_is_replaced() -> None:
    filled = fill_audit(PROSE, Evidence())
    assert filled.startswith(
        "# Audit\n\nBefore 0.7629.\n\n<!-- table order -->\n\nNot measured yet: A1, A2, A3, A4, A5.\n\n<!-- end -->\n\n"
        "After.\n\n<!-- table cost -->\n\nNot measured yet: mvp-v2, "
    )
    assert filled.endswith(".\n\n<!-- end -->\n")
    assert fill_audit(filled, Evidence()) == filled


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("<!-- table ordr -->\n<!-- end -->",
         "a.md asks for the table 'ordr', which is not known; did you mean 'order'?"),
        ("<!-- table -->\n<!-- end -->", "a.md asks for the table '', which is not known; there are context, lengths"),
        ("<!-- table order -->\n", "a.md opens the table 'order' and does not close it; write `<!-- end -->` after it"),
        ("<!-- table order -->\n<!-- table cost -->\n<!-- end -->",
         "a.md opens the table 'order' and does not close it"),
        ("text\n<!-- end -->", "a.md has an `<!-- end -->` that closes no table; remove it"),
    ],
)  # fmt: skip
def test_a_wrong_marker_is_refused_in_one_sentence(text: str, refusal: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fill_audit(text, Evidence(), file="a.md")
    assert str(caught.value).startswith(refusal)


@pytest.fixture
def audit(make_up: MakeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An audit beside made-up results, not filled yet."""
    make_up("A1", loss=0.75)
    path = tmp_path / "docs" / "audit.md"
    path.parent.mkdir()
    path.write_text(PROSE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return path


def test_the_command_fills_the_audit_and_the_check_passes(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == "docs/results.md, docs/audit.md, and 2 figures in docs/figures\n"
    (row,) = read_rows(audit.read_text(encoding="utf-8").split("<!-- table order -->\n\n")[1])
    assert (row["run"], row["padded loss"], row["published loss"]) == ("A1", 0.75, 0.7629)
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == "docs/results.md, docs/audit.md and 2 figures show the results\n"


def test_the_check_finds_a_changed_digit_and_lets_prose_be(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = audit.read_text(encoding="utf-8")
    audit.write_text(text.replace("Before 0.7629.", "Before 0.9."), encoding="utf-8")
    assert main(["--check"]) == 0
    audit.write_text(text.replace("| 0.7500 |", "| 0.7501 |"), encoding="utf-8")
    capsys.readouterr()
    assert main(["--check"]) == 1
    assert (
        capsys.readouterr().err
        == "documents: docs/audit.md does not show the results; run `python -m tools.documents`\n"
    )
    assert "| 0.7501 |" in audit.read_text(encoding="utf-8"), "a check writes nothing"


def test_the_check_finds_a_new_record_of_lengths(audit: Path, tmp_path: Path) -> None:
    audit.write_text("<!-- table lengths -->\n<!-- end -->\n", encoding="utf-8")
    assert main([]) == 0
    write_lengths(tmp_path, "A1")
    assert main(["--check"]) == 1


def test_a_wrong_marker_stops_the_command_before_anything_is_written(
    audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit.write_text("<!-- table nothing -->\n<!-- end -->\n", encoding="utf-8")
    assert main([]) == 2
    assert capsys.readouterr().err.startswith(
        "documents: docs/audit.md asks for the table 'nothing', which is not known"
    )
    assert list(audit.parent.iterdir()) == [audit]


def test_the_results_are_not_written_over_the_audit(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", "docs/audit.md"]) == 2
    assert "--out docs/audit.md is the name of the audit, which is written by hand" in capsys.readouterr().err
    assert audit.read_text(encoding="utf-8") == PROSE


def test_the_audit_of_this_repository_has_every_table_once() -> None:
    text = (REPOSITORY / "docs" / "audit.md").read_text(encoding="utf-8")
    names = [marker["name"].strip() for marker in MARKER.finditer(text) if marker["name"] is not None]
    assert sorted(names) == sorted(TABLES)
    fill_audit(text, Evidence())
