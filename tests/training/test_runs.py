"""A run as an object: `some_moe.train` makes it, `some_moe.load` opens it, and it shows itself."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import some_moe
from some_moe.config import ConfigError, RunConfig
from some_moe.errors import FailureError
from some_moe.lab.registry.presets import find_preset
from some_moe.sinks.display import Display
from tests.shared.typed import edit_config, listing

pytestmark = pytest.mark.usefixtures("own_place")
SMALL = {"data.train_subset_size": 24, "data.val_subset_size": 4, "train.epochs": 1, "train.sample_tokens": 0}


def small(**changes: object) -> RunConfig:
    return find_preset("smoke").override(SMALL | changes)


def test_train_makes_the_run_that_load_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = some_moe.train(small(), display=False)
    assert capsys.readouterr().out == ""
    again = some_moe.load("runs/smoke")
    assert run.path == again.path == Path("runs/smoke")
    assert run.config == again.config
    assert run.result == again.result == json.loads((tmp_path / "runs" / "smoke" / "result.json").read_text())
    ids = torch.tensor([run.tokenizer.encode("Once upon a time")])
    assert torch.equal(run.model(ids).logits, again.model(ids).logits)
    assert run.step == again.step == 3
    assert not run.model.training


def test_train_takes_a_config_a_file_or_a_name(tmp_path: Path) -> None:
    small(name="filed").save(tmp_path / "c.yaml")
    assert some_moe.train("c.yaml", display=False).path == Path("runs/filed")
    assert some_moe.train(Path("c.yaml"), out=tmp_path / "other", display=False).config.name == "filed"
    assert some_moe.train("smoke", display=False).path == Path("runs/smoke")


def test_the_example_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code.replace("demo", "smoke"), names)
    assert names["losses"]["loss"] == pytest.approx(names["run"].result["val_loss"])
    assert "everything is in runs/smoke" in capsys.readouterr().out


def test_train_speaks_to_the_display_that_it_is_given() -> None:
    class Listener(Display):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def say(self, text: str) -> None:
            self.lines.append(text)

    listener = Listener()
    some_moe.train(small(), display=listener)
    assert "24 training stories" in listener.lines[0]
    assert "epoch 1, step 3: val loss" in listener.lines[-1]


def test_train_resumes_and_begins_with_other_weights(tmp_path: Path, trained: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    finished = some_moe.train(resume=copy, display=False)
    assert finished.result == json.loads((copy / "result.json").read_text())
    (copy / "result.json").unlink()
    again = some_moe.train(resume=copy / "checkpoints" / "step-3", display=False).result
    assert again is not None
    assert finished.result is not None
    assert again | {"phases": {}} == finished.result | {"phases": {}}
    begun = some_moe.train(small(), out="new", init_from=trained, resume="auto", display=False)
    assert begun.result != finished.result


def test_train_refuses_in_one_sentence(tmp_path: Path, trained: Path) -> None:
    before = listing(tmp_path)
    for arguments, words in (
        ({"config": "dmo"}, "'dmo' is not a preset; did you mean 'demo'?"),
        ({"config": "none.yaml"}, "cannot read the config 'none.yaml'"),
        ({}, "a new run needs a config; give a RunConfig"),
        ({"config": small(), "out": trained}, "is not empty; continue it with --resume auto"),
        ({"config": small(), "out": ""}, "--out is empty"),
        ({"resume": "nowhere"}, "'nowhere' is not a run"),
        ({"config": small(), "init_from": "nowhere"}, "'nowhere' is not a run"),
        ({"config": small(**{"train.epochs": 7}), "resume": trained}, "train.epochs (1 there, 7 here)"),
        ({"resume": trained, "init_from": trained}, "begins a run, but"),
    ):
        with pytest.raises(ConfigError) as refusal:
            some_moe.train(**arguments)  # type: ignore[arg-type]
        assert words in str(refusal.value)
    assert listing(tmp_path) == before


def test_config_and_result_are_read_without_torch(trained: Path) -> None:
    script = (
        "import sys, some_moe; run = some_moe.load(sys.argv[1]); "
        "print(run.config.name, run.result['steps'], run.step, 'torch' in sys.modules); repr(run); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(trained)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["smoke", "3", "3", "False", "False"]


def test_a_checkpoint_that_is_not_there_is_refused_when_a_run_is_opened(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no checkpoint 'step-9'; it has step-3 \(or say best or last\)"):
        some_moe.load(trained, checkpoint="step-9")
    shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        some_moe.load(tmp_path / "copy")


def test_a_checkpoint_that_training_removed_meanwhile_is_chosen_anew(trained: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "copy" / "checkpoints"
    shutil.copytree(trained, tmp_path / "copy")
    run = some_moe.load(tmp_path / "copy")
    assert run.step == 3
    state = (checkpoints / "step-3").rename(checkpoints / "step-4") / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"step": 4}))
    assert run.model is run.model
    assert run.step == 4


def test_a_run_is_evaluated_and_writes(trained: Path) -> None:
    run = some_moe.load(trained)
    assert run.result is not None
    assert run.evaluate(device="cpu")["loss"] == pytest.approx(run.result["test_loss"])
    texts = ["".join(run.generate("Once", 8, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_model_that_gives_no_number_is_not_scored(trained: Path) -> None:
    run = some_moe.load(trained)
    with torch.no_grad():
        next(run.model.parameters()).fill_(3e38)  # finite, as a file that is taken must be
    with pytest.raises(FailureError, match=r"gives no number on test split \(nan or infinity\); use an earlier"):
        run.evaluate(device="cpu")


def test_a_run_shows_itself(trained: Path) -> None:
    run = some_moe.load(trained)
    assert run.result is not None
    assert repr(run).splitlines()[0] == "smoke: finished after 3 steps"
    assert f"test loss {run.result['test_loss']:.4f}" in repr(run)
    assert f"epoch 1, step 3: train loss {run.result['train_loss']:.4f}, val loss {run.result['val_loss']:.4f}" in repr(
        run
    )
    assert repr(run).splitlines()[-1] == f"everything is in {trained}"


def test_a_run_shows_itself_in_a_notebook_with_a_hostile_name_escaped(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    config = RunConfig.load(tmp_path / "copy" / "config.yaml").override({"name": "<script>alert(1)<b>"})
    config.save(tmp_path / "copy" / "config.yaml")
    with (tmp_path / "copy" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "train_loss": 6.0}\n{"step": 5, "train_loss": 5.5}\n')
    page = some_moe.load(tmp_path / "copy")._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;b&gt;: finished after 3 steps" in page
    assert "over 5 steps" in page
    assert page.count("<polyline") == 1


def test_a_run_that_has_not_finished_shows_itself_too(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("result.json", "metrics.jsonl"))
    run = some_moe.load(tmp_path / "copy")
    assert run.result is None
    assert repr(run).startswith("smoke: training or killed\n")


def test_text_that_a_run_was_not_trained_on_is_not_read_for_it(trained: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("".join(f"Word {n} is a secret.\n\n" for n in range(40)))
    copy = edit_config(trained, tmp_path / "stranger", {"data.source": str(secret)})
    run = some_moe.load(copy)
    for read in (run.read_data, run.evaluate, lambda: run.evaluate(data=secret, trigram=True)):
        with pytest.raises(ConfigError, match=r"data.source '.*secret.txt' is not what '.*stranger' was trained on"):
            read()
    assert run.evaluate(data=secret)["num_tokens"] > 0


def test_rows_of_another_length_than_the_runs_are_named_as_such(trained: Path, tmp_path: Path) -> None:
    run = some_moe.load(edit_config(trained, tmp_path / "edited", {"data.seq_len": 32}))
    with pytest.raises(ConfigError, match=r"was trained with data.seq_len 128, config.yaml now says 32; restore it"):
        run.evaluate()


def test_a_run_reads_its_own_text_in_rows_of_any_length(trained: Path) -> None:
    run = some_moe.load(trained)
    whole, short = run.read_data(), run.read_data(16)
    assert len(whole.train) == len(short.train)
    assert short.train.lengths.max() == 16 < whole.train.lengths.max()


def test_what_the_machine_refuses_is_an_error_of_ours(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*arguments: Any, **options: Any) -> Any:  # noqa: ARG001
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: not enough memory")

    with pytest.raises(ConfigError, match="cannot be used"):
        some_moe.load("x" * 300)
    run = some_moe.load(trained)
    model = run.model
    monkeypatch.setattr(type(model), "forward", run_out)
    pieces = run.generate("Once")
    for use in (lambda: next(pieces), run.evaluate, lambda: some_moe.train(small(), out="mine", display=False)):
        with pytest.raises(FailureError, match="memory ran out"):
            use()
