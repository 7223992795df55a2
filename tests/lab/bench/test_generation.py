"""The benchmark of generation: others on the same weights tell the same, and who fails has a row that says so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from some_moe.cli import main
from some_moe.lab.bench.generation import bench_generation
from some_moe.lab.bench.tables import describe_generation, format_part
from some_moe.model.transformer import SomeLM
from tests.shared.variants import BASE


def test_ours_is_timed_beside_others_and_one_that_fails_says_why() -> None:
    model = SomeLM(BASE)

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("it has no cache\nof this kind")

    def repeat(prompt: Tensor, count: int) -> Tensor:
        return prompt[:, :1].expand(-1, count)

    others = {"broken": fail, "parrot": repeat}
    (case,) = bench_generation(model, [2], others, prompt_tokens=3, tokens=6, repeats=2)
    ours, broken, parrot = case["found"]
    assert ours["same"] == 1
    assert ours["tokens_per_second"] == pytest.approx(12 / ours["seconds"])
    assert (broken["status"], broken["reason"]) == ("failed", "it has no cache")
    assert parrot["same"] < 1
    assert ours["speed_to_fastest_peer"] == pytest.approx(parrot["seconds"] / ours["seconds"])
    shown = format_part(describe_generation(case), width=None, color=False)
    assert "FAILED" in shown
    assert "2 rows, 3 tokens of prompt, 6 behind it" in shown


def test_transformers_tells_the_same_on_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    words = ["--shape", "smoke", "--rows", "1,3", "--tokens", "5", "--prompt-tokens", "4", "--repeats", "1"]
    words += ["--device", "cpu", "--model.activation", "swiglu", "--json", str(tmp_path / "found.json")]
    assert main(["bench", "generate", *words]) == 0
    assert "transformers, static cache" in capsys.readouterr().out
    report = json.loads((tmp_path / "found.json").read_text())
    assert [case["rows"] for case in report["cases"]] == [1, 3]
    for case in report["cases"]:
        assert [row["same"] for row in case["found"]] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rows", "0"], "some: --rows '0' is not a list of whole numbers from 1 to 4,096; write it like 1,64"),
        (["--tokens", "0"], "some: --tokens 0 is out of range; use 1 to 65,536"),
        (["--repeats", "0"], "some: --repeats 0 is out of range; use 1 to 10,000"),
    ],
)
def test_bad_numbers_are_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generate", *words]) == 2
    assert capsys.readouterr().err == sentence + "\n"
