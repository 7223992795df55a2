"""`some eval --seq-lens` as a person types it: the figures of `some eval`, one object or tables, bad input refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from some_moe.cli import main

SMOKE = [
    *("train", "--preset", "smoke", "--data.train-subset-size", "24", "--data.val-subset-size", "4"),
    *("--train.epochs", "1", "--train.sample-tokens", "0", "--data.seq-len", "320"),
]
PADDED = ["--data.batching", "padded", "--data.loss-on", "all_positions", "--data.count-padding"]


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", params=[[], PADDED], ids=["text", "all positions"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["SOME_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main([*SMOKE, *request.param, "--out", str(path)]) == 0
    return path


def read_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


@pytest.mark.parametrize("split", ["test", "valid"])
def test_at_its_own_length_a_run_has_the_figures_of_some_eval(
    trained: Path, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["eval", str(trained), "--split", split, "--checkpoint", "last"]
    plain = read_json(capsys, *common)
    record = read_json(capsys, *common, "--seq-lens", "64,320,400")
    assert [found["seq_len"] for found in record["lengths"]] == [64, 320, 400]
    own = record["lengths"][1]
    for name in ("loss", "perplexity", "bits_per_byte", "num_tokens"):
        assert own[name] == plain[name]
    middle = plain["layers"][record["middle_layer"]]
    assert own["gini"] == middle.get("gini_real", middle["gini"])
    if record["loss_on"] == "all_positions":
        assert (own["loss_padded"], own["gini_padded"]) == (plain["loss_padded"], middle["gini"])
    assert record["step"] == plain["step"]


def test_the_object_says_where_its_figures_come_from_without_places(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_json(capsys, "eval", str(trained), "--seq-lens", "64")
    assert (record["run"], record["experiment"], record["seed"], record["step"]) == ("run", None, 0, 3)
    assert (record["split"], record["source"]) == ("test", "stories")
    assert record["stories"] == {"train": 24, "valid": 4, "test": 4}
    assert set(record["versions"]) == {"python", "torch", "some_moe"}
    assert "commit" in record
    assert str(trained.parent) not in json.dumps(record)


def test_the_tables_show_every_length_and_label_the_padded_loss(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_json(capsys, "eval", str(trained), "--seq-lens", "64,400")
    assert main(["eval", str(trained), "--seq-lens", "64,400"]) == 0
    printed = capsys.readouterr().out
    for found in record["lengths"]:
        for name, digits in (("loss", 4), ("loss_padded", 4), ("constant_loss_padded", 4), ("gini_padded", 3)):
            assert f"{found[name]:.{digits}f}" in printed
    assert "padded: over padding too, as published up to v4" in printed
    assert ("learned from text alone" in printed) == (record["loss_on"] == "text")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--seq-lens", "64,x"],
            "--seq-lens '64,x' is not a list of whole numbers from 2 to 65,536; write it like 256,512,1024",
        ),
        (["--seq-lens", "1,64"], "--seq-lens '1,64' is not a list of whole numbers from 2 to 65,536"),
        (["--seq-lens", "1" * 5000], f"--seq-lens '{'1' * 77}…' is not a list of whole numbers from 2 to 65,536"),
        (["--seq-lens", "²"], "--seq-lens '²' is not a list"),
        (["--seq-lens", "64.5"], "--seq-lens '64.5' is not a list"),
        (["--seq-lens=-4"], "--seq-lens '-4' is not a list"),
        (["--seq-lens", ""], "--seq-lens '' is not a list"),
        (["--seq-lens", "64,32,64"], "--seq-lens '64,32,64' names a length twice; name each once"),
        (["--seq-lens", "64", "--data", "f.txt"], "--seq-lens 64 and --data exclude each other; give one of them"),
        (["--seq-lens", "64", "--adapt"], "--seq-lens 64 and --adapt exclude each other"),
        (["--seq-lens", "64", "--trigram"], "--seq-lens 64 and --trigram exclude each other"),
    ],
)
def test_bad_lengths_and_flags_that_do_not_fit_are_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "nowhere", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"some: {sentence}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
