"""`some bench layer` and `some bench step`: what they print, write and refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from some_moe.cli import main
from some_moe.config import ModelConfig

LAYER = ["bench", "layer", "--shapes", "smoke", "--device", "cpu"]
STEP = ["bench", "step", "--shape", "smoke", "--batch", "2", "--seq-len", "32", "--device", "cpu"]


def test_layer_prints_a_table_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, results = tmp_path / "found.json", tmp_path / "RESULTS.md"
    extra = ["--tokens", "16,32", "--seconds", "0.001", "--variants", "some cpu,torch-grouped,dense"]
    assert main([*LAYER, *extra, "--json", str(found), "--markdown", str(results)]) == 0
    printed = capsys.readouterr().out
    assert "smoke, 32 tokens, skewed routing" in printed
    assert "Ours beside the fastest peer that computes the same function" in printed
    report = json.loads(found.read_text())
    assert report["benchmark"] == "layer"
    assert report["environment"]["command"].startswith("some bench layer --shapes smoke")
    assert str(tmp_path) not in json.dumps(report)
    assert {"torch", "triton", "transformers", "commit", "device"} <= set(report["environment"])
    assert [(case["tokens"], case["routing"]) for case in report["cases"]] == [
        (16, "balanced"), (16, "skewed"), (32, "balanced"), (32, "skewed"),
    ]  # fmt: skip
    assert all(row["status"] == "ok" for case in report["cases"] for row in case["rows"])
    text = results.read_text()
    assert text.startswith("# Benchmarks\n\n## One layer's experts, ")
    assert text.count("\n### ") == 4
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert sum(line.startswith("| some cpu |") for line in rows) == 4


def test_step_prints_and_appends_a_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, results = tmp_path / "found.json", tmp_path / "RESULTS.md"
    results.write_text("# Measured\n\nby hand\n")
    assert main([*STEP, "--steps", "2", "--profile", f"--json={found}", "--markdown", str(results)]) == 0
    printed = capsys.readouterr().out
    assert "One training step of smoke, natural routing" in printed
    assert "The longest kernels" in printed
    report = json.loads(found.read_text())
    assert report["step"]["repeats"] == 2
    assert report["environment"]["command"].endswith("--steps 2 --profile")
    text = results.read_text()
    assert text.startswith("# Measured\n\nby hand\n\n## One training step of smoke, natural routing, ")
    assert "| kernel | calls | ms a step | share |" in text


def test_a_run_cut_off_leaves_the_cases_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from some_moe.lab.bench import layer

    whole = layer.make_problem

    def cut_off(model: ModelConfig, like: Tensor, tokens: int, *more: Any) -> layer.Problem:
        if tokens == 32:
            raise KeyboardInterrupt
        return whole(model, like, tokens, *more)

    monkeypatch.setattr(layer, "make_problem", cut_off)
    found = tmp_path / "found.json"
    extra = ["--tokens", "16,32", "--seconds", "0.001", "--routing", "balanced", "--variants", "some cpu"]
    assert main([*LAYER, *extra, "--json", str(found)]) == 130
    assert [case["tokens"] for case in json.loads(found.read_text())["cases"]] == [16]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            [*LAYER, "--tokens", "12,x"],
            "--tokens 'x' is not a count of tokens of at most 16,777,216; give numbers such as 24576",
        ),
        (
            [*LAYER, "--tokens", ","],
            "--tokens ',' is not a count of tokens of at most 16,777,216; give numbers such as 24576",
        ),
        ([*LAYER, "--tokens", "²"], "is not a count of tokens"),
        ([*LAYER, "--tokens", "9" * 5000], "is not a count of tokens"),
        ([*STEP, "--batch", "10000000000000"], "--batch 10000000000000 is out of range"),
        ([*LAYER, "--seconds", "0"], "--seconds 0.0 is out of range; use more than 0 and at most 600"),
        (["bench", "layer", "--shapes", "gains", "--trainability", "full", "--device", "cpu"], "is a study of frozen"),
        (
            [*LAYER, "--trainability", "full", "--tokens", "16,20"],
            "--tokens 20 is not a multiple of 8, as the peers' weight gradients need",
        ),
        ([*LAYER, "--variants", "best"], "--variants 'best' is not known on cpu; choose from some cpu, some grouped"),
        ([*LAYER, "--json", "no/such/place.json"], "--json 'no/such/place.json' lies in a folder that does not exist"),
        ([*LAYER, "--markdown", "."], "--markdown '.' is a folder; name a file in it"),
        (["bench", "layer", "--shapes", "A11", "--device", "cpu"], "'A11' is not a preset; did you mean"),
        (["bench", "layer", "--shapes", "dense-equal-trainable", "--device", "cpu"], "has no experts to measure"),
        (["bench", "layer", "--device", "tpu"], "train.device 'tpu' is"),
        ([*STEP, "--batch", "0"], "--batch 0 is out of range; use 1 to 1,048,576"),
        ([*STEP, "--seq-len", "1"], "--seq-len 1 is out of range; use 2 to 65,536"),
        ([*STEP, "--steps", "0"], "--steps 0 is out of range; use 1 to 1,000,000"),
        ([*STEP, "--shape", "smok"], "'smok' is not a preset; did you mean 'smoke'?"),
        ([*STEP, "--kernel", "fast"], "train.kernel must be"),
        ([*STEP, "--num-experts", "1"], "top_k 2 is more than num_experts 1"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("some: ")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []
