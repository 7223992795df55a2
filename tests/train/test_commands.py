"""The commands as a person types them: results on stdout, bad input as one sentence, exit code 2, nothing touched."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from some_moe.cli import main
from some_moe.config import RunConfig
from some_moe.data.tokenizer import Tokenizer
from some_moe.train.recorder import RunFolder

SMOKE = [
    *("train", "--preset", "smoke", "--data.train-subset-size", "24", "--data.val-subset-size", "4"),
    *("--train.epochs", "1", "--train.sample-tokens", "4"),
]
HEAVY = {
    "torch._dynamo", "torch._inductor", "triton", "sympy", "numba", "scipy", "sklearn", "umap", "networkx",
    "matplotlib", "pandas", "pyarrow", "datasets", "transformers",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["SOME_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main([*SMOKE, "--out", str(path)]) == 0
    return path


def listing(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must be refused; return its one sentence."""
    capsys.readouterr()
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("some: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


# --- what works -------------------------------------------------------------------------------------------


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
    (tmp_path / "other.txt").write_text("To be or not to be.\n\nThat is the question.\n\n" * 20)
    before = listing(trained)
    losses = []
    for extra in ([], ["--adapt"]):
        capsys.readouterr()
        assert main(["eval", str(trained), "--data", "other.txt", "--json", *extra]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["num_bytes"] == 20 * len("To be or not to be." + "That is the question.")
        losses.append(record["loss"])
    assert losses[0] != losses[1]
    assert listing(trained) == before


def edit_config(trained: Path, copy: Path, changes: dict[str, str]) -> Path:
    """A copy of the trained run whose config says something else."""
    shutil.copytree(trained, copy)
    RunConfig.load(copy / "config.yaml").override(changes).save(copy / "config.yaml")
    return copy


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


# --- what is refused --------------------------------------------------------------------------------------


def test_missing_empty_binary_and_broken_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\nnot json\n')
    (tmp_path / "fields.jsonl").write_text('{"body": "a"}\n')
    before = listing(tmp_path)
    for source, words in (
        ("none.txt", "does not exist"),
        ("empty.txt", "holds no text"),
        ("binary.txt", "not UTF-8"),
        ("broken.jsonl", "line 2, is not JSON"),
        ("fields.jsonl", "needs a 'text' field"),
    ):
        sentence = refused(capsys, *SMOKE, "--data.source", source, "--out", "run")
        assert source in sentence
        assert words in sentence
    assert listing(tmp_path) == before


def test_fewer_stories_than_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.txt").write_text("One.\n\nTwo.\n\nThree.\n\nFour.\n\nFive.")
    sentence = refused(capsys, *SMOKE, "--data.source", "few.txt", "--out", "run")
    assert "gives 3 training rows, fewer than one step of 8; lower data.batch_size" in sentence
    assert not (tmp_path / "run").exists()


def test_unknown_presets_flags_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'dmo' is not a preset; did you mean 'demo'?" in refused(capsys, "train", "--preset", "dmo")
    assert "did you mean '--model.num-experts'?" in refused(capsys, "train", "--model.num-expert", "4")
    assert "model.top_k 99 is more than num_experts 8" in refused(capsys, *SMOKE, "--model.top-k", "99")
    assert "train.device 'cuda:99' is not there" in refused(capsys, *SMOKE, "--train.device", "cuda:99")
    assert "exclude each other" in refused(capsys, "train", "--preset", "demo", "--config", "x.yaml")
    assert "cannot read the config 'x.yaml'" in refused(capsys, "train", "--config", "x.yaml")
    assert "'treat' is not a command" in refused(capsys, "treat")
    assert list(tmp_path.iterdir()) == []


def test_a_resume_folder_from_another_config_names_the_fields(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(trained)
    command = [*SMOKE, "--train.learning-rate", "0.5", "--out", str(trained), "--resume", "auto"]
    sentence = refused(capsys, *command)
    assert "train.learning_rate (0.003 there, 0.5 here)" in sentence
    assert listing(trained) == before


def test_a_run_begun_on_another_machine_is_continued_with_its_experts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun_on_gpu = edit_config(trained, tmp_path / "copy", {"model.expert_dtype": "bfloat16"})
    command = [*SMOKE, "--out", str(begun_on_gpu), "--resume", "auto"]
    assert main(command) == 0
    assert "is finished already" in capsys.readouterr().out
    sentence = refused(capsys, *command, "--model.expert-dtype", "float32")
    assert "model.expert_dtype (bfloat16 there, float32 here)" in sentence


def test_only_runs_and_whole_checkpoints_are_resumed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(trained)
    for path in ("nowhere", str(trained / "checkpoints")):
        assert f"{path!r} is not a run" in refused(capsys, "train", "--resume", path)
    shutil.copytree(trained / "checkpoints" / "step-3", tmp_path / "a" / "b" / "step-3")
    assert "a' is not a run" in refused(capsys, "train", "--resume", str(tmp_path / "a" / "b" / "step-3"))
    assert listing(trained) == before


def test_weights_to_begin_with_are_refused_where_a_run_is_resumed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = damage(trained, tmp_path)
    before = listing(copy)
    for resumed in (["--out", str(copy), "--resume", "auto"], ["--resume", str(copy)]):
        sentence = refused(capsys, *SMOKE, *resumed, "--init-from", str(trained))
        assert f"--init-from {trained} begins a run, but '{copy}' has begun already; leave it out" in sentence
    assert listing(copy) == before
    assert main([*SMOKE, "--out", str(tmp_path / "new"), "--resume", "auto", "--init-from", str(trained)]) == 0


def test_a_folder_where_another_process_trains_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = damage(trained, tmp_path)
    before, other = listing(copy), RunFolder(copy)
    with other.claim():
        sentence = refused(capsys, "train", "--resume", str(copy))
        assert f"another process is training in '{copy}'; wait for it to end" in sentence
        assert main(["eval", str(copy)]) == 0
        assert listing(copy) == before
    other.release()
    assert main(["train", "--resume", str(copy)]) == 0


def test_training_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m some_moe {' '.join(SMOKE)} --train.log-every 1 --out run | head -1",
        shell=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 3


def test_a_used_folder_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(trained)
    assert "is not empty" in refused(capsys, *SMOKE, "--out", str(trained))
    assert listing(trained) == before


def damage(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run whose result is gone, so that it can be resumed."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "result.json").unlink()
    return copy


def test_truncated_and_tampered_checkpoints_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = damage(trained, tmp_path)
    model = copy / "checkpoints" / "step-3" / "model.safetensors"
    content = model.read_bytes()
    for broken in (content[: len(content) // 2], content[:-1] + bytes([content[-1] ^ 1])):
        model.write_bytes(broken)
        before = listing(copy)
        for command in (["train", "--out", str(copy), "--resume", "auto"], ["generate", str(copy)]):
            sentence = refused(capsys, *command)
            assert "model.safetensors' is truncated or was changed" in sentence
        assert listing(copy) == before
    model.unlink()
    assert "model.safetensors is missing" in refused(capsys, "eval", str(copy))


def test_a_run_of_a_newer_format_is_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = damage(trained, tmp_path)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("format_version: 1", "format_version: 9"))
    before = listing(copy)
    assert "format_version 9 is newer" in refused(capsys, "train", "--out", str(copy), "--resume", "auto")
    assert "format_version 9 is newer" in refused(capsys, "generate", str(copy))
    assert listing(copy) == before


def test_experts_that_do_not_match_their_checksum_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = damage(trained, tmp_path)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("expert_seed: 0", "expert_seed: 1"))
    assert "the experts of layer 0 have seed 1, but the saved model was made with 0" in refused(
        capsys, "generate", str(copy)
    )


def test_an_unwritable_output_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    sentence = refused(capsys, *SMOKE, "--out", str(tmp_path / "file" / "run"))
    assert "cannot be written" in sentence
    assert "--out" in sentence


def test_a_tokenizer_that_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"word{n} thing{n * 3}" for n in range(200)]
    (tmp_path / "t.json").write_text(Tokenizer.train(texts, 600).to_json())
    sentence = refused(capsys, *SMOKE, "--data.tokenizer", "t.json", "--out", "run")
    assert "ids, but model.vocab_size is 512; raise vocab_size" in sentence
    assert not (tmp_path / "run").exists()


def test_folders_that_are_no_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run: it has no config.yaml" in refused(capsys, "generate", str(tmp_path))
    assert "is not a run" in refused(capsys, "eval", "nowhere")


def test_generation_settings_out_of_range_are_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--temperature", "-1"), ("--top-p", "0"), ("--top-p", "2"), ("--max-tokens", "0")):
        assert f"{flag} " in refused(capsys, "generate", str(trained), flag, value)
    assert "--temperature" in refused(capsys, "generate", str(trained), "--temperature", "hot")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--train.save-every", "--train.epochs", "2"], "--train.save-every needs a value behind it"),
        (["--out", ""], "--out is empty"),
        (["--out", "afile"], "'afile' is a file"),
    ],
)
def test_a_flag_without_its_value_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("afile").touch()
    assert main([*SMOKE, *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_resumed_run_is_compared_with_what_was_asked_alone(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--train.epochs", "7"]) == 2
    message = capsys.readouterr().err
    assert "another config: train.epochs (1 there, 7 here); resume it without" in message
    assert "--init-from" in message


@pytest.mark.parametrize(("flag", "value"), [("--prompt", "\udcff"), ("--seed", str(10**22))])
def test_generate_refuses_what_it_cannot_begin_with(
    trained: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert main(["generate", str(trained), flag, value]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"some: {flag} ")
