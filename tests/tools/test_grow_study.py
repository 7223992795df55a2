"""The study of growing and merging: its cells run, what is done stays done, and its page says what they found."""

import gzip
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from some_moe.data.batches import Rows
from some_moe.growth.api import HEAD_RANK
from some_moe.stories.generator import tell_many
from tools.grow_study import plan
from tools.grow_study.__main__ import hide_path, main
from tools.grow_study.cells import find_ready, run_cell
from tools.grow_study.cost import Clock, fill_slices
from tools.grow_study.figure import find_frontier
from tools.grow_study.page import Results, judge, make_page
from tools.grow_study.plan import METHODS, REPLAY, Cell, Study, best_point, choose_rate, find_rates, parse_cell
from tools.grow_study.texts import add_rows, join, mix_rows, read_splits

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["harbour", "library", "mill", "station", "garden", "museum", "parcel", "letter", "report", "decision"]


def write_texts(place: Path) -> list[str]:
    """Five kinds of text of our own, and the words of the command that name them."""
    draw = Random(0)
    code = "def {}({}): return {} * {}".format
    texts = {
        "stories": [story.text for story in tell_many(50)],
        "cries": [story.text.upper() for story in tell_many(50, seed=5)],
        "sums": [" ".join(f"{draw.randrange(99)} + {draw.randrange(99)} = ?" for _ in range(40)) for _ in range(40)],
        "code": ["\n".join(code(*draw.sample(WORDS, 3), draw.randrange(9)) for _ in range(12)) for _ in range(40)],
        "lists": [", ".join(draw.choice(WORDS) for _ in range(60)) for _ in range(40)],
    }
    for name, documents in texts.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    given = {name: f"{name}={place / name}.jsonl" for name in texts}
    base, domains = [given["stories"], given["cries"]], [given["sums"], given["code"]]
    return ["--base", *base, "--domain", *domains, "--unseen", given["lists"]]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """A study that is laid out, and of which nothing has run: it may begin no cell."""
    place = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        words = ["--work", str(place / "work"), "--out", str(place / "out"), "--size", "mini", "--device", "cpu"]
        assert main(["run", *words, *write_texts(place), "--seeds", "0", "1", "--minutes", "0"]) == 0
        yield Study.load(place / "work")


def read(study: Study, cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((study.out / f"{cell.name}.json").read_text())
    return found


def test_a_cell_leaves_every_figure_and_where_it_comes_from(study: Study) -> None:
    base, cell = Cell("base", 0, family="gravity"), Cell("grow", 0, 4e-3, "gravity")
    run_cell(study, base)
    run_cell(study, cell)
    found, own = read(study, cell), read(study, base)["rows"][0]
    assert found["data"] == dict(study.digests)
    assert len({*found["data"].values()}) == 6
    assert found["command"].startswith("python -m tools.grow_study run --work work --out out --size mini")
    assert found["texts"] == {"base": ["stories", "cries"], "domains": ["sums", "code"], "unseen": ["lists"]}
    texts = {"stories", "cries", "sums", "code", "lists", "mixed", "base", "gained", "unseen"}
    for row in found["rows"]:
        assert row["valid"].keys() == row["test"].keys() == texts
        assert row["test"]["gained"] == pytest.approx((row["test"]["sums"] + row["test"]["code"]) / 2, abs=1e-4)
    assert found["rows"][0]["test"]["base"] == pytest.approx(own["test"]["base"], abs=0.02)  # held back, it is the base
    assert min(row["test"]["gained"] for row in found["rows"]) < own["test"]["gained"] - 0.005
    assert found["alone"].keys() == {"sums", "code"}
    assert found["pairs"].keys() == {"sums+code"}
    assert found["pairs"]["sums+code"]["sums"] == next(r["test"]["sums"] for r in found["rows"] if r["point"] == 0)
    per_expert = 2 * 32 * 32 + 32 + 32
    experts = 2 * 3 * (per_expert + 32 + 1)  # in two layers; with its key, and its bias
    assert found["trained_bytes"] == 4 * 2 * (experts + HEAD_RANK * (32 + 512))  # of two domains


def test_what_is_done_is_not_done_again(study: Study, tmp_path: Path) -> None:
    of_one = replace(study, out=tmp_path, methods=("turn",))
    ready, left = find_ready(of_one, set())
    assert {cell.name for cell in ready} == {"base-dense-seed0", "base-dense-seed1"}
    assert left == 2 + 3
    (tmp_path / "base-dense-seed0.json").write_text("{}")  # its figures alone are no base to stand on
    assert {cell.name for cell in find_ready(of_one, set())[0]} == {"base-dense-seed0", "base-dense-seed1"}
    assert find_ready(of_one, {cell for cell in ready if cell.seed == 1})[0] == [Cell("base", 0, family="dense")]


def make_up(gained: dict[str, float], seeds: tuple[int, ...] = (0, 1, 2)) -> dict[str, dict[str, Any]]:
    """Cells whose curves lose 0, 0.04 and 0.3, and gain `gained` less at each; the middle rate is the best."""
    texts = {"base": ["stories"], "domains": ["law", "code"], "unseen": ["sums"]}
    about = {
        "texts": texts,
        "size": {"name": "full", **vars(plan.SIZES["full"])},
        "machine": "a machine",
        "commit": "1",
    }
    about |= {"cell_seconds": 60.0, "seconds": 30.0, "processes": 3, "command": "python", "data": {"law": "d" * 64}}
    about |= {"trained_bytes": 10**7, "stored_bytes": 10**6}

    def row(point: float, lost: float, better: float, seed: int) -> dict[str, Any]:
        losses = {"stories": 3 + lost, "law": 5 - better, "code": 6 - better, "sums": 6.5, "mixed": 5.0}
        losses = {name: loss + 0.002 * seed for name, loss in losses.items()}
        means = {"base": losses["stories"], "gained": (losses["law"] + losses["code"]) / 2, "unseen": losses["sums"]}
        return {"point": point, "valid": losses | means, "test": losses | means}

    cells: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        for family in plan.FAMILIES:
            cell = {"method": "base", "family": family, "seed": seed, "rows": [row(0, 0, 0, seed)]}
            cells[Cell("base", seed, family=family).name] = about | cell
        for name, best in gained.items():
            for rate in METHODS[name].rates:
                worse = 0.1 * (rate != METHODS[name].rates[1])
                points = enumerate((0.0, 0.04, 0.3), -1)
                rows = [row(at, lost, (best - worse) * (0.5, 1, 1.5)[at + 1], seed) for at, lost in points]
                told = {"told": [row(0, 0, 1.05 - worse, seed)], "told_stored_bytes": 10**6, "by_words": rows}
                alone = {"law": {"stories": 3.01, "law": 4.0}, "code": {"stories": 3.01, "code": 5.0}}
                pairs = {"law+code": {"stories": 3.02, "law": 4.1, "code": 5.1}}
                cell = {
                    "method": name,
                    "seed": seed,
                    "rate": rate,
                    "rows": rows,
                    **told,
                    "alone": alone,
                    "pairs": pairs,
                }
                cells[Cell(name, seed, rate).name] = about | cell
    return cells


RIVALS = {"gradient": 0.3, "centroid": 0.9, "gate": 0.8, "turn": 0.4, "arithmetic": 0.5, "adapters": 0.94,
          "replay-written": 0.6}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        (1.0, "**The claim holds** against what was planned."),
        (0.97, "**The claim does not hold**: against adapters by nearest prototype it is ahead by 0.030."),
        (0.93, "**The claim does not hold**: against one centroid a domain it is ahead by 0.030."),
    ],
)
def test_the_page_says_whether_the_claim_holds(tmp_path: Path, ours: float, sentence: str) -> None:
    (tmp_path / "results").mkdir()
    cells = make_up(RIVALS | {"grow-context": ours, "joint": 1.2})
    for name, cell in cells.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(cell))
    out = tmp_path / "docs" / "studies" / "grow.md"
    files = make_page(tmp_path / "results", out)
    page = files[out].decode()
    assert sentence in page
    assert f"The library gains {5.502 - ours:.3f} ± 0.002 and loses 0.040 ± 0.000." in page
    assert re.search(r"\| \*\*library, looking back\*\* \| (5\.\d+) ± 0\.002 \| 4\.\d+ ± 0\.002 \|", page)
    assert b"<svg" in files[tmp_path / "docs" / "figures" / "study-grow.svg"]
    assert files == make_page(tmp_path / "results", out)


def test_a_control_that_is_missing_leaves_the_claim_open() -> None:
    some = {name: gained for name, gained in RIVALS.items() if name != "gate"} | {"grow-context": 1.5}
    words = " ".join(judge(Results(make_up(some))))
    assert "Not measured yet" in judge(Results(make_up(some)), "grow")[0]
    assert "**The claim does not hold**: a gate for each expert is not measured" in words


def test_controls_that_came_later_have_a_verdict_of_their_own() -> None:
    cells = make_up(RIVALS | {"grow-context": 1.0})
    words = " ".join(judge(Results(cells)))
    assert "**The claim holds** against what was planned." in words
    assert "**it does not hold**" not in words
    assert "it holds there too" in words
    for name, cell in cells.items():
        if name.startswith("arithmetic"):
            cell["by_words"] = cell["told"]
    words = " ".join(judge(Results(cells)))
    assert "**The claim holds** against what was planned." in words
    assert "**it does not hold**: against dense alone, by words it is behind by" in words


def test_an_interval_over_seeds_can_break_the_claim() -> None:
    cells = make_up(RIVALS | {"grow-context": 1.0})
    for seed, shift in ((1, 0.4), (2, -0.4)):
        for row in cells[Cell("centroid", seed, METHODS["centroid"].rates[1]).name]["rows"]:
            row["test"]["gained"] += shift
    words = " ".join(judge(Results(cells)))
    assert "**The claim does not hold**: against one centroid a domain it is ahead by 0.100" in words


def test_a_rate_at_the_end_is_tried_beyond(study: Study) -> None:
    cells = make_up({"turn": 0.5}, seeds=(0,))
    low, middle, high = METHODS["turn"].rates
    assert choose_rate("turn", cells, 0) == middle
    for row in cells[Cell("turn", 0, high).name]["rows"]:
        row["valid"]["gained"] -= 2
    assert [*find_rates("turn", cells, 0)] == [low, middle, high, 9e-4]
    assert choose_rate("turn", cells, 0) is None
    of_one = replace(study, methods=("turn",))
    assert [cell.rate for cell, _ in plan.list_cells(of_one, cells)] == [low, middle, high, 9e-4]
    cells[Cell("turn", 0, 9e-4).name] = cells[Cell("turn", 0, low).name]
    assert choose_rate("turn", cells, 0) == high
    assert [(cell.seed, cell.rate) for cell, _ in plan.list_cells(of_one, cells)][-1] == (1, high)


def test_what_is_measured_beside_a_method_has_a_rate_of_its_own(study: Study) -> None:
    cells = make_up({"adapters": 0.5}, seeds=(0,))
    low, middle, high = METHODS["adapters"].rates
    cells[Cell("adapters", 0, high).name]["told"][0]["valid"]["gained"] -= 2
    assert [*find_rates("adapters", cells, 0)] == [*find_rates("adapters-told", cells, 0)] == [low, middle, high, 0.11]
    assert choose_rate("adapters-told", cells, 0) is None
    cells[Cell("adapters", 0, 0.11).name] = cells[Cell("adapters", 0, low).name]
    assert choose_rate("adapters-told", cells, 0) == high
    assert choose_rate("adapters-words", cells, 0) == choose_rate("adapters", cells, 0) == middle
    of_one = replace(study, methods=("adapters",))
    assert [cell.rate for cell, _ in plan.list_cells(of_one, cells) if cell.seed == 1] == [middle, high]
    assert Results(cells).rows("adapters-told", 0) == cells[Cell("adapters", 0, high).name]["told"]


def test_joint_training_is_chosen_by_all_that_it_learns() -> None:
    cells = make_up({"joint": 0.5}, seeds=(0,))
    for rate, worse in zip(METHODS["joint"].rates, (0.4, 0.2, 0.5), strict=True):
        cell = cells[Cell("joint", 0, rate).name]
        cell["rows"] = cell["rows"][2:]  # which loses more than any limit
        cell["rows"][0]["valid"] |= {"base": 3.3 + worse, "gained": 4.0}
    assert choose_rate("joint", cells, 0) == METHODS["joint"].rates[1]


def test_the_base_itself_stands_where_every_point_loses_too_much() -> None:
    cells = make_up({"turn": 0.5}, seeds=(0,))
    base = cells["base-dense-seed0"]
    rows = cells[Cell("turn", 0, METHODS["turn"].rates[1]).name]["rows"]
    assert best_point(rows[1:], base, 0.02) == base["rows"][0]
    assert best_point(rows, base, 0.05) == rows[1]


def test_cells_have_names_that_can_be_read() -> None:
    for name, method in METHODS.items():
        for rate in method.rates:
            cell = Cell(name, 2, rate, method.family)
            assert parse_cell(cell.name) == cell
    assert parse_cell("base-dense-seed1") == Cell("base", 1, family="dense")


def test_the_frontier_is_what_nothing_beats() -> None:
    assert find_frontier([(0.1, 4.0), (0.0, 5.0), (0.2, 4.5), (0.3, 3.0), (0.05, 5.0)]) == [(0, 5), (0.1, 4), (0.3, 3)]


def count_up(*lengths: int) -> Rows:
    return join([np.arange(length, dtype=np.uint16) for length in lengths])


def test_replayed_rows_make_the_share_that_was_asked_for() -> None:
    new, old = count_up(*[40] * 30), count_up(*[10] * 7)
    for share in (0.01, 0.05, 0.2):
        rows = add_rows(new, old, share, seed=0)
        assert len(rows.ids) - len(new.ids) == pytest.approx(share * len(rows.ids), abs=10)
    assert add_rows(new, old, 0.0, seed=0) is new
    assert sorted(REPLAY.values()) == [0, 0.01, 0.05, 0.2, 0.2]


def test_mixed_rows_change_their_text_half_way() -> None:
    texts = [join([np.full(9, number, np.uint16) for _ in range(4)]) for number in range(3)]
    mixed = mix_rows(texts, 20, seq_len=8)
    assert (mixed.first != mixed.second).all()
    for row, first, second in zip(range(20), mixed.first, mixed.second, strict=True):
        assert mixed.rows[row].tolist() == [first] * 5 + [second] * 4


def test_texts_without_splits_are_cut_in_order_and_short_ones_are_joined(tmp_path: Path) -> None:
    (tmp_path / "plays.txt").write_text("\n\n".join(f"A: speech {number} is short." for number in range(2000)))
    found = read_splits("plays", str(tmp_path / "plays.txt"))
    assert min(map(len, found["train"])) > 900
    numbers = [
        int(number)
        for split in ("train", "valid", "test")
        for text in found[split]
        for number in re.findall(r"\d+", text)
    ]
    assert numbers == list(range(2000))
    for split in ("train", "valid", "test"):
        lines = [json.dumps({"question": f"{split} {number}?", "answer": "x" * 300}) for number in range(3)]
        (tmp_path / f"sums_{split}.jsonl").write_text("\n".join(lines) + "\n")
    found = read_splits("sums", str(tmp_path / "sums_*.jsonl"))
    assert [text.split()[0] for text in found["valid"]] == ["valid"] * 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["walk"], "'walk' is no verb of the study; use one of run, cell, plan, page"),
        (["run", "--base", "stories"], "--base 'stories' names no text; write NAME=FILES"),
        (["run", "--domain", "b=none"], "--domain needs two texts or more"),
        (["run", "--size", "huge"], "--size 'huge' is unknown; use full, medium, laptop, small, mini"),
        (["run", "--processes", "0"], "--processes 0 is out of range; use 1 or more"),
        (["run", "--methods", "magic"], "--methods 'magic' is unknown; use grow, "),
        (["run"], "matches no file; give files that are there"),
        (["plan", "--processes", "0"], "--processes 0 is out of range; use more than 0"),
        (["cell", "magic-seed0", "--work", "w"], "'magic-seed0' is no cell"),
        (["page", "--results", "nowhere"], "'nowhere' holds no results; run the study first"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] == "run":
        rest = {"--work": ["w"], "--base": ["a=none"], "--domain": ["b=none", "c=none"], "--unseen": ["d=none"]}
        rest["--work"], rest["--out"] = [str(tmp_path / "w")], [str(tmp_path / "o")]
        words = words + [word for flag, values in rest.items() if flag not in words for word in (flag, *values)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_results_of_two_sizes_do_not_mix(study: Study, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_cell(replace(study, out=tmp_path), Cell("base", 0, family="gravity"))
    texts = write_texts(tmp_path)
    words = ["run", "--work", str(tmp_path / "w"), "--out", str(tmp_path), "--size", "small", *texts]
    assert main(words) == 2
    assert "holds results of another size (base-gravity-seed0: mini); give another" in capsys.readouterr().err


def test_no_path_of_a_machine_stands_in_a_result() -> None:
    assert hide_path(f"law={os.sep}home{os.sep}law.txt") == "law=FILES"
    assert hide_path(f"{os.sep}home{os.sep}work") == "work"
    assert hide_path("--size") == "--size"


@pytest.mark.parametrize(("processes", "minutes"), [(1, [4.0, 4.0, 1.0]), (2, [4.0, 1.0]), (9, [3.0])])
def test_no_cell_of_a_slice_ends_after_it(processes: int, minutes: list[float]) -> None:
    assert fill_slices([60, 180, 60, 60, 180], processes, 4) == minutes


def test_a_cell_is_expected_to_take_what_others_took() -> None:
    size, texts = plan.SIZES["full"], (6, 10)
    guess = Clock({}, size, *texts)
    grow, turn = Cell("grow", 0, 4e-3, "gravity"), Cell("turn", 0, 1e-4, "dense")
    took = {"cell_seconds": 3 * guess.expect(grow), "method": "grow", "seed": 0, "rate": 1e-3}
    clock = Clock({"a": took, "b": {}}, size, *texts)
    assert clock.expect(grow) == took["cell_seconds"]
    assert clock.expect(turn) == pytest.approx(3 * guess.expect(turn))
    assert guess.expect(Cell("joint", 0)) > guess.expect(grow) > guess.expect(Cell("gate", 0))


def test_the_plan_counts_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    assert "seconds are guessed" in first
    assert "seed 0: 71 cells" in first  # three bases, and four rates of each of 17 methods
    assert "seed 2: 20 cells" in first
    for name, cell in make_up({"turn": 0.5}).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(cell))
    assert main(["plan", "--out", str(tmp_path)]) == 0
    after = capsys.readouterr().out
    assert "measured in 18 cells" in after
    assert "seed 0: 64 cells" in after
    assert "seed 2: 16 cells" in after


@pytest.mark.slow
def test_every_method_runs_and_the_page_shows_it(study: Study, tmp_path: Path) -> None:
    torch.manual_seed(0)
    of_all = replace(study, out=tmp_path / "results")
    of_all.out.mkdir()
    for family in plan.FAMILIES:
        run_cell(of_all, Cell("base", 0, family=family))
    results = {}
    for name, method in METHODS.items():
        if not method.rates:
            continue
        cell = Cell(name, 0, method.rates[0], method.family)
        if name == "gate":  # which stands on the rate that was chosen for what is grown
            found = read(of_all, Cell("grow", 0, METHODS["grow"].rates[0], "gravity"))
            for rate, worse in zip(METHODS["grow"].rates[1:], (-1.0, 0.0), strict=True):
                rows = [
                    row | {"valid": row["valid"] | {"gained": row["valid"]["gained"] + worse}} for row in found["rows"]
                ]
                again = found | {"rate": rate, "rows": rows}
                (of_all.out / f"{Cell('grow', 0, rate).name}.json").write_text(json.dumps(again))
        run_cell(of_all, cell)
        results[name] = read(of_all, cell)
    for name, found in results.items():
        base = read(of_all, Cell("base", 0, family=METHODS[name].family))["rows"][0]
        assert all(np.isfinite([*row["test"].values(), *row["valid"].values()]).all() for row in found["rows"]), name
        assert found["rows"][-1]["test"]["gained"] != base["test"]["gained"], name
        assert found["steps"] > 0, name
    for name in ("turn", "arithmetic"):  # what is hardly changed is hardly another model
        assert results[name]["rows"][0]["test"]["base"] == pytest.approx(
            read(of_all, Cell("base", 0, family="dense"))["rows"][0]["test"]["base"], abs=5e-3
        )
    held = results["adapters"]["rows"][0]["test"]
    assert held["base"] == results["adapters"]["told"][0]["test"]["base"]  # told or held back, old text is the base's
    told = results["grow-context"]["told"][0]["test"]
    assert told["base"] == read(of_all, Cell("base", 0, family="gravity"))["rows"][0]["test"]["base"]
    by_words, told = results["adapters"]["by_words"][-1]["test"], results["adapters"]["told"][0]["test"]
    assert by_words["gained"] == pytest.approx(told["gained"], abs=0.05)  # these texts have words of their own
    alike = [results[name]["rows"][-1]["test"]["gained"] for name in ("grow", "grow-wide", "grow-context")]
    assert len({*alike}) == 3
    page = make_page(of_all.out, tmp_path / "docs" / "studies" / "grow.md")
    text = page[tmp_path / "docs" / "studies" / "grow.md"].decode()
    assert all(METHODS[name].words in text for name in METHODS)


@pytest.mark.slow
@pytest.mark.usefixtures("study")
def test_a_study_that_was_stopped_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MOST_MORE", 0)
    words = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--size", "mini", "--device", "cpu"]
    words += [*write_texts(tmp_path), "--seeds", "0", "--methods", "turn", "--processes", "2"]
    monkeypatch.setattr(Clock, "expect", lambda _, cell: 1.0 if cell.method == "base" else 1e9)
    assert main(["run", *words, "--minutes", "1"]) == 0  # no rate would end in time
    monkeypatch.undo()
    monkeypatch.setattr(plan, "MOST_MORE", 0)
    said = capsys.readouterr().out
    assert "base-dense-seed0: done" in said
    assert "3 known cells are left; run it again" in said
    assert main(["run", *words]) == 0
    said = capsys.readouterr().out
    assert "base-dense-seed0" not in said
    assert said.count("turn-rate") == 3
    assert "every cell is done" in said


@pytest.mark.slow
def test_a_slice_takes_texts_as_they_are_carried_and_packs_its_results(tmp_path: Path) -> None:
    draw = Random(0)
    (tmp_path / "texts").mkdir()
    for number, name in enumerate(("stories", "novels", "law", "code", "dialogue", "math", "tales")):
        for split, count in (("train", 40), ("valid", 8), ("test", 8)):
            words = [f"{name[: number + 1]}{word}" for word in WORDS]
            documents = [{"text": " ".join(draw.choice(words) for _ in range(90))} for _ in range(count)]
            lines = "".join(json.dumps(one) + "\n" for one in documents).encode()
            (tmp_path / "texts" / f"{name}_{split}.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "texts" / "plays.txt").write_text("\n\n".join(f"A: speech {number} is short." for number in range(900)))
    asked = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}. " * 20} for n in range(60)]
    (tmp_path / "texts" / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    (tmp_path / "out").mkdir()
    more = {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "SOME_CACHE": str(tmp_path / "cache")}
    words = ["bash", str(ROOT / "tools/grow_study/slice.sh"), "texts", "9", "--size", "mini", "--device", "cpu"]
    words += ["--processes", "1", "--seeds", "0", "--methods", "grow-context"]
    places = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    found = subprocess.run(
        words, cwd=tmp_path, env=os.environ | more | {"PYTHONPATH": places}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "base-gravity-seed0: done" in found.stdout
    assert "seed 2: 20 cells" in found.stdout  # the plan of what is left
    with tarfile.open(tmp_path / "out" / "grow.tar.gz") as packed:
        names = packed.getnames()
    assert "results/grow/base-gravity-seed0.json" in names
    assert len([name for name in names if "grow-context-rate" in name]) >= 3
