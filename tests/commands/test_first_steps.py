"""The first minutes: a demo, a config with its schema, what is installed, and a shell that completes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from some_moe.cli import COMMANDS, main
from some_moe.commands import first_steps
from some_moe.config import RunConfig
from some_moe.lab import doctor
from some_moe.lab.registry import EXPERIMENTS
from some_moe.lab.registry.presets import PRESETS, find_preset

QUICK = ["--data.train-subset-size", "24", "--data.val-subset-size", "6", "--train.epochs", "1", "--model.d-model=16"]


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)


# --- some demo ------------------------------------------------------------------------------------------------


def test_the_demo_trains_scores_and_writes_and_tells_what_a_page_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_steps, "find_spec", lambda _: None)
    assert main(["demo", *QUICK, "--out", "here"]) == 0
    said = capsys.readouterr().out
    assert "test loss" in said
    assert "trigram" in said
    assert said.endswith("a page of it needs pip install 'some-moe[analysis]'; then: some report here\n")
    assert RunConfig.load("here/config.yaml").model.d_model == 16
    assert main(["demo", *QUICK, "--out=here"]) == 0  # it goes on: there is nothing left to train
    assert "here is finished already" in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo_writes_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *QUICK]) == 0
    assert Path("runs/demo/report.html").is_file()
    assert "open runs/demo/report.html" in capsys.readouterr().out


# --- some init ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [None, *PRESETS, "A1", "mvp-v2"])
def test_what_init_writes_is_the_preset_and_every_setting_stands_in_it(
    preset: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [] if preset is None else ["--preset", preset]
    assert main(["init", "mine.yaml", *words, "--train.seed", "3"]) == 0
    assert capsys.readouterr().out.startswith("mine.yaml and mine.schema.json; next: some train --config mine.yaml")
    base = RunConfig() if preset is None else find_preset(preset)
    assert RunConfig.load("mine.yaml") == base.override({"train.seed": 3})
    text = Path("mine.yaml").read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=./mine.schema.json\n")
    for name in RunConfig.field_names():
        assert re.search(rf"^ *#?{name.rpartition('.')[2]}: ", text, re.MULTILINE), name
    # With every # taken away it is still a config, and the same one.
    Path("all.yaml").write_text(re.sub(r"^( *)#(?! )", r"\1", text, flags=re.MULTILINE), encoding="utf-8")
    assert RunConfig.load("all.yaml") == RunConfig.load("mine.yaml")


def test_the_schema_tells_choices_bounds_and_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    train = schema["$defs"]["TrainConfig"]["properties"]
    assert train["fast"]["enum"] == ["auto", "off"]
    assert train["learning_rate"]["exclusiveMinimum"] == 0
    assert train["clip"]["description"].startswith("Largest norm of the gradient")
    assert schema["$defs"]["ModelConfig"]["additionalProperties"] is False
    assert not list(Path().iterdir())


def test_the_schema_takes_what_the_config_takes_and_refuses_what_it_refuses() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    assert main(["init"]) == 0
    schema = json.loads(Path("config.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for name in (*PRESETS, *(experiment.name for experiment in EXPERIMENTS[:20])):
        check.validate(find_preset(name).model_dump(mode="json"))
    values = yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))
    check.validate(values)
    for room, field, value in (("model", "top_k", 0), ("train", "fast", "on"), ("data", "no_such", 1)):
        assert not check.is_valid(values | {room: values[room] | {field: value}})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["there.yaml"], "some: 'there.yaml' is there already; choose another name, or add --force\n"),
        (["a.txt"], "some: 'a.txt' is not a config file; give a name that ends in .yaml\n"),
        (["no/a.yaml"], "some: the folder 'no' does not exist; make it, or choose another place\n"),
        (["--preset", "dem"], "some: 'dem' is not a preset; did you mean 'demo'?\n"),
    ],
)
def test_init_refuses_in_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("there.yaml").write_text("mine")
    assert main(["init", *words]) == 2
    assert capsys.readouterr().err == sentence
    assert [path.name for path in Path().iterdir()] == ["there.yaml"]
    assert Path("there.yaml").read_text() == "mine"


# --- some doctor ----------------------------------------------------------------------------------------------


def test_the_doctor_tells_what_computes_and_where_caches_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "x").write_bytes(b"0" * 5000)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["layer_difference"] < 1e-4
    assert found["caches"][0]["path"] == str(tmp_path / "own")
    assert found["caches"][0]["bytes"] == 5000
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "experts by" in said
    assert "4.9 KiB of at most 10.0 GiB" in said


def test_what_is_missing_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.11", 'optuna>=4.5; extra == "sweep"', 'ruff>=0.8; extra == "dev"']
    monkeypatch.setattr(doctor, "requires", lambda _: lines)
    monkeypatch.setattr(doctor, "find_version", lambda _: None)
    assert doctor.list_extras([]) == {"sweep": {"optuna": None}}
    found = {
        "python": "3.11", "platform": "x", "cores": 1, "memory_free_bytes": None, "disk_free_bytes": 0, "torch": None,
        "extras": doctor.list_extras([]), "caches": [], "problems": ["torch is not installed; run pip install torch"],
    }  # fmt: skip
    said = first_steps.format_examination(found)
    assert "missing optuna: pip install 'some-moe[sweep]'" in said
    assert "torch is not installed; run pip install torch" in said


def test_what_is_older_than_an_extra_asks_for_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch>=2.11",
        'a>=5.17; extra == "hf"',
        'b==0.0.60; extra == "docs"',
        'c; extra == "x"',
        'd>=2; extra == "x"',
    ]
    versions = {"a": "5.4.1", "b": "0.0.60", "c": "0.1", "d": None}
    monkeypatch.setattr(doctor, "requires", lambda _: lines)
    monkeypatch.setattr(doctor, "find_version", versions.get)
    sentence = "a 5.4.1 is older than 5.17, which the extra hf needs; run pip install -U 'some-moe[hf]'"
    problems: list[str] = []
    assert doctor.list_extras(problems)["hf"] == {"a": "5.4.1"}
    assert problems == [sentence]


# --- some completion ------------------------------------------------------------------------------------------


def complete(script: str, words: list[str]) -> list[str]:
    """What bash offers behind these words."""
    line = " ".join(f"'{word}'" for word in words)
    asked = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _some; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_settings_presets_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert set(complete(script, ["some", ""])) >= set(COMMANDS)
    assert complete(script, ["some", "tra"]) == ["train", "trace"]
    assert set(complete(script, ["some", "experiments", ""])) >= {"list", "show", "run", "compare"}
    assert complete(script, ["some", "experiments", "run", "--joi"]) == ["--join"]
    assert complete(script, ["some", "train", "--model.num-e"]) == ["--model.num-experts"]
    assert complete(script, ["some", "train", "--preset", "smo"]) == ["smoke"]
    assert complete(script, ["some", "train", "--train.fast", ""]) == ["auto", "off"]
    assert complete(script, ["some", "eval", "--split", "te"]) == ["test"]
    assert complete(script, ["some", "train", "--train.fast", "=", "o"]) == ["off"]  # bash takes --train.fast=o apart
    assert complete(script, ["some", "train", "--train.fast", "="]) == ["auto", "off"]
    assert complete(script, ["some", "experiments", "run", "frozen-k"]) == ["frozen-keys"]
    assert complete(script, ["some", "eval", ""]) == []
    assert complete(script, ["some", "report", "ru"]) == []  # files are the shell's own affair
    assert complete(script, ["some", "eval", "--model.t"]) == []  # it takes no settings


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["-n"]), ("fish", ["--no-execute"]), ("bash", ["-n"])])
def test_every_script_is_one_that_its_shell_reads(
    shell: str, check: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("--model.num-experts", "experiments", "sweep" if "sweep" in COMMANDS else "train"):
        assert word.removeprefix("--") in script
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} to read it")
    (tmp_path / "script").write_text(script)
    done = subprocess.run([shell, *check, str(tmp_path / "script")], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
