"""Bad input, as a person types it: one sentence, exit code 2, nothing touched."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from some_moe.cli import main
from some_moe.data.tokenizer import Tokenizer
from some_moe.training.run_folder import RunFolder
from tests.shared.typed import SMOKE, edit_config, listing, refused

pytestmark = pytest.mark.usefixtures("own_place")


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
    assert main(["train", "--resume", str(tmp_path / "run"), "--train.warmup", "0.5"]) == 2
    message = capsys.readouterr().err
    assert "another config: train.warmup (0.03 there, 0.5 here); resume it without" in message
    assert "--init-from" in message


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [("--prompt", "\udcff", r"'\udcff' is not UTF-8 text; convert it"), ("--seed", str(10**22), "--seed ")],
)
def test_generate_refuses_what_it_cannot_begin_with(
    trained: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, sentence: str
) -> None:
    assert main(["generate", str(trained), flag, value]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"some: {sentence}")
