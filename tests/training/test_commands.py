"""The commands as a person types them: results on stdout, exit code 0."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from some_moe.cli import main
from some_moe.config import RunConfig
from tests.shared.typed import SMOKE, edit_config, listing, refused

pytestmark = pytest.mark.usefixtures("own_place")
HEAVY = {
    "torch._dynamo", "torch._inductor", "triton", "sympy", "numba", "scipy", "sklearn", "umap", "networkx",
    "matplotlib", "pandas", "pyarrow", "datasets", "transformers",
}  # fmt: skip


def test_train_ends_with_tables_of_epochs_and_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMOKE, "--name", "mine"]) == 0
    printed = capsys.readouterr().out
    assert "How the experts share the work" in printed
    assert "test loss" in printed
    assert "\x1b" not in printed
    assert (tmp_path / "runs" / "mine" / "result.json").is_file()


def test_eval_prints_honest_losses_and_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((trained / "result.json").read_text())
    capsys.readouterr()
    assert main(["eval", str(trained), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["loss"] == pytest.approx(result["test_loss"])
    assert main(["eval", str(trained), "--split", "valid"]) == 0
    assert f"loss {result['val_loss']:.4f}" in capsys.readouterr().out


def test_eval_reads_any_text_and_adapts_without_changing_the_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.txt").write_text("To be or not to be.\n\nThat is the question.\n\n" * 100)
    before = listing(trained)
    losses = []
    for extra in ([], ["--adapt"]):
        capsys.readouterr()
        assert main(["eval", str(trained), "--data", "other.txt", "--json", *extra]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["num_bytes"] == 100 * len("To be or not to be." + "That is the question.")
        assert record["adapt"] == bool(extra)
        losses.append(record["loss"])
    assert losses[0] != losses[1]
    assert listing(trained) == before


def test_eval_reads_other_text_as_the_run_reads_its_own(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = edit_config(trained, tmp_path / "run", {"data.separator": "***"})
    (tmp_path / "other.txt").write_text("To be.***Or not to be.")
    assert main(["eval", str(run), "--data", "other.txt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_bytes"] == len("To be.Or not to be.")


@pytest.mark.parametrize("words", [[], ["--seq-lens", "32"]])
def test_eval_scores_on_the_device_that_is_there_or_asked_for(
    trained: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = edit_config(trained, tmp_path / "run", {"train.device": "cuda:99"})
    assert main(["eval", str(run), "--json", *words]) == 0
    assert main(["eval", str(run), "--json", *words, "--device", "cpu"]) == 0
    assert "'cuda:99' is not there" in refused(capsys, "eval", str(run), *words, "--device", "cuda:99")


def test_eval_refuses_data_that_is_not_there_with_a_cure_that_it_offers(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, "eval", str(trained), "--data", "stories")
    assert "--data 'stories' does not exist; give a file or a folder, or leave it out" in sentence


def test_eval_prints_the_trigram_beside_the_model(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), "--trigram", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert 1 < record["trigram_loss"] < record["loss"]  # three steps of training beat nothing
    assert 0 < record["trigram_discount"] < 1
    assert main(["eval", str(trained), "--trigram"]) == 0
    assert f"{record['trigram_loss']:.4f} nats per token" in capsys.readouterr().out


def test_generate_repeats_with_the_seed_and_keeps_the_prompt(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        capsys.readouterr()
        command = ["generate", str(trained), "--prompt", "Once", "--seed", seed, "--max-tokens", "20"]
        assert main(command) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("Once") for text in texts)


def test_generate_says_its_seed_and_what_goes_beyond_the_rows_it_learned_from(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["generate", str(trained), "--max-tokens", "200"]) == 0
    first = capsys.readouterr()
    said = re.search(r"^seed (\d+): --seed \1 repeats it$", first.err, re.MULTILINE)
    assert said
    assert "1 tokens of prompt and 200 behind it are more than the 128 that the model has learned from" in first.err
    assert main(["generate", str(trained), "--max-tokens", "200", "--seed", said[1]]) == 0
    assert capsys.readouterr().out == first.out


def test_generate_prints_one_object_and_reads_prompts_from_files_and_lines(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    words = ["generate", str(trained), "--max-tokens", "5", "--seed", "3", "--json"]
    (tmp_path / "prompt.txt").write_text("Once é\n", encoding="utf-8")
    assert main([*words, "--prompt-file", str(tmp_path / "prompt.txt"), "--count", "2", "--top-k", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(text["prompt"], text["seed"]) for text in found["texts"]] == [("Once é", 3), ("Once é", 4)]
    assert found["top_k"] == 4
    monkeypatch.setattr(sys, "stdin", io.StringIO("One\nTwo\n"))
    assert main([*words, "--interactive"]) == 0
    assert [text["prompt"] for text in json.loads(capsys.readouterr().out)["texts"]] == ["One", "Two"]
    assert main([*words, "--interactive", "--prompt", "x"]) == 2
    assert "--prompt and --interactive exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_a_folder_that_is_no_run_is_refused_before_torch_is_loaded(command: str) -> None:
    script = (
        f"import sys; from some_moe.cli import main; code = main([{command!r}, 'none'])\n"
        "sys.exit(0 if code == 2 and 'torch' not in sys.modules else 1)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "'none' is not a run" in done.stderr


@pytest.mark.slow
def test_a_prompt_is_utf_8_whatever_the_locale(trained: Path) -> None:
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "some_moe", "generate", str(trained), "--json", "--seed", "1", "--max-tokens", "3"]
    done = subprocess.run([*command, "--prompt", "é 🙂"], env=plain, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["texts"][0]["prompt"] == "é 🙂", done.stderr


@pytest.mark.parametrize("prompt", ["- Hello", "-Hello", "--Hello"])
def test_a_text_that_begins_with_a_dash_is_no_option(
    trained: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["generate", str(trained), "--prompt", prompt, "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith(prompt)
    assert main(["trace", str(trained), "--json", "--", prompt]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert "".join(token["text"] for token in tokens[1:]) == prompt  # behind bos


@pytest.mark.parametrize("words", [["generate", "--max-tokens", "2", "--prompt", "Once upon a time " * 20], ["eval"]])
def test_commands_that_compile_nothing_load_no_compiler_and_nothing_else_heavy(trained: Path, words: list[str]) -> None:
    script = (
        f"import sys; from some_moe.cli import main; code = main({[*words, str(trained)]!r}); "
        f"sys.exit(code or ' '.join({HEAVY!r} & set(sys.modules)) or 0)"
    )
    on_cpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # a GPU's kernels need Triton
    done = subprocess.run([sys.executable, "-c", script], env=on_cpu, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("precision", "stored"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_dry_run_prints_config_parameters_memory_and_time_and_touches_nothing(
    tmp_path: Path, precision: str, stored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMOKE, "--train.precision", precision, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for word in ("d_model: 32", "parameters: 44,096 trained of 77,888", "memory: about", "time: ", "steps: 3"):
        assert word in printed
    assert f"expert_dtype: {stored}" in printed  # as the run's own config.yaml would say
    assert list(tmp_path.iterdir()) == []


def test_settings_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--settings"]) == 0
    printed = capsys.readouterr().out
    for name in RunConfig.field_names():
        if "." in name:
            assert f"--{name.replace('_', '-')} (" in printed
    assert "--model.positions (rope; one of rope, alibi, sinusoidal)" in printed


def test_a_finished_run_resumed_says_so_and_changes_nothing(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(trained)
    assert main(["train", "--out", str(trained), "--resume", "auto"]) == 0
    assert "is finished already" in capsys.readouterr().out
    assert listing(trained) == before


def test_a_run_folder_is_resumed_at_its_newest_checkpoint_and_not_when_it_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([*SMOKE, "--train.save-every", "1", "--train.keep-last", "3", "--out", str(run)]) == 0
    before = listing(run)
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 0
    assert f"{run} is finished already" in capsys.readouterr().out
    assert listing(run) == before
    # The newest is resumed, also where another is the best.
    (run / "result.json").unlink()
    state_file = run / "checkpoints" / "step-3" / "state.json"
    state_file.write_text(json.dumps(json.loads(state_file.read_text()) | {"best_step": 1}))
    assert main(["train", "--resume", str(run)]) == 0
    assert f"resuming {run} at step 3 of 3" in capsys.readouterr().out
    assert main(["train", "--resume", str(run / "checkpoints" / "step-2")]) == 0
    assert f"resuming {run} at step 2 of 3" in capsys.readouterr().out


def test_a_config_file_and_flags_of_every_shape_are_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunConfig(name="filed").save(tmp_path / "c.yaml")
    flags = "--deterministic --model.top-k=2 --model.gains --gravity.beta -0.002 --gravity.max-step 0.1"
    flags += " --gravity.frozen-layers [0,1]"
    command = ["train", "--config", "c.yaml", *flags.split(), "--data.train-subset-size", "null", "--dry-run"]
    command += ["--model.d-model", "32", "--model.num-experts", "8", "--data.batch-size", "2", "--data.seq-len", "16"]
    assert main(command) == 0
    torch.use_deterministic_algorithms(False)
    text = capsys.readouterr().out
    config = RunConfig.from_yaml(text[: text.index("\nparameters:")])
    assert (config.name, config.model.top_k, config.model.gains) == ("filed", 2, True)
    assert config.train.deterministic
    assert (config.gravity.beta, config.gravity.frozen_layers) == (-0.002, (0, 1))
