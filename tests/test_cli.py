"""The command line: what it prints, what it refuses, and how fast it answers."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from some_moe.cli import COMMANDS, Commands, Parser, UsageError, main
from some_moe.lab.card import ONLY_WHEN, describe, format_card
from some_moe.lab.listing import format_listing
from some_moe.lab.registry import EXPERIMENTS, find_experiment
from some_moe.layout import Style

SOURCE = Path(__file__).parents[1] / "src"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SOURCE)}
USUAL = 0.13  # seconds of processor time


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=30
    )


def test_list_names_every_experiment_without_truncation_or_escape_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["experiments", "list"]) == 0
    text = capsys.readouterr().out
    for experiment in EXPERIMENTS:
        assert f"  {experiment.name} " in text
        assert experiment.title in text
    assert "\033" not in text
    assert "419.14  0.7629" in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_listing_fits_its_width_and_keeps_names_and_figures_whole(width: int) -> None:
    text = format_listing(width=width)
    assert max(map(len, text.splitlines())) <= width
    lines = text.splitlines()
    for experiment in EXPERIMENTS:
        assert any(line.startswith(f"  {experiment.name} ") for line in lines)
    assert any(line.startswith("  B3 ") and line.endswith("5406.00  0.7155") for line in lines)


def test_emphasis_is_the_only_difference_on_a_terminal() -> None:
    plain, styled = format_listing(width=80), format_listing(width=80, style=Style(on=True))
    assert "\033[1m" in styled
    for code in ("\033[0m", "\033[1m", "\033[2m"):
        styled = styled.replace(code, "")
    assert styled == plain


@pytest.mark.parametrize("width", [80, 120, None])
def test_every_card_fits_its_width(width: int | None) -> None:
    widest = {
        experiment.name: max(map(len, format_card(experiment, width=width).splitlines())) for experiment in EXPERIMENTS
    }
    assert {name: length for name, length in widest.items() if length > min(width or 100, 100)} == {}


def test_a_card_marks_what_is_assumed_and_prints_what_was_published() -> None:
    text = format_card(find_experiment("A1"))
    words = " ".join(text.split())
    for fragment in ("positions ~rope", "alpha 0.01", "warmup ~0.03", "419,144,704 in all, 15,770,624 trained",
                     "4 0.8061 0.7629 2.14 0.791 4.085", "gini 0.7912 (layer 4)", "64 of 64 experts",
                     "lived, in, a, was", "Inferred: one story a row"):  # fmt: skip
        assert fragment in words


def test_a_card_of_a_study_says_what_it_changes_and_asks() -> None:
    words = " ".join(format_card(find_experiment("D1-beta-scale")).split())
    assert "Changed from A6 gravity.beta_layer_scale none → 8 × 1, 8 × 0.5" in words
    assert "Does a weaker peer pull" in words


def test_a_card_hides_fields_that_are_out_of_use() -> None:
    frozen_dense = format_card(find_experiment("frozen-dense"))
    assert "num_experts" not in frozen_dense
    assert "decay_mode" not in frozen_dense
    assert "lora_rank" not in format_card(find_experiment("A1"))
    assert "lora_rank" in format_card(find_experiment("lora-4"))


def test_conditions_on_fields_name_real_fields_and_tell_experiments_apart() -> None:
    configs = [experiment.config.flatten() for experiment in EXPERIMENTS]
    assert set(ONLY_WHEN) <= set(configs[0])
    answers = {name: {bool(condition(fields)) for fields in configs} for name, condition in ONLY_WHEN.items()}
    assert {name: found for name, found in answers.items() if found != {True, False}} == {}


def test_list_json_is_an_array_of_short_objects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == len(EXPERIMENTS)
    assert rows["A1"]["published_val_loss"] == 0.7629
    assert rows["A1"]["trainable_parameters"] == 15_770_624
    assert rows["frozen-dense"]["num_experts"] is None


def test_show_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "show", "a6", "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["name"] == "A6"
    assert card["config"]["model"]["num_layers"] == 16
    assert card["total_parameters"] == 1_117_356_032
    assert card["steps"] == card["published"]["steps"] == 1248
    assert card["published"]["epochs"][3] == {
        "epoch": 4, "train_loss": 2.1309, "val_loss": 1.9682, "perplexity": 7.16, "gini": None,
        "entropy_bits": None,
    }  # fmt: skip
    assert {"series", "title", "assumed", "trainable_parameters", "notes", "derived_from", "question"} <= set(card)


def test_show_json_has_null_where_nothing_is_known() -> None:
    card = describe(find_experiment("full-tinystories"))
    assert card["steps"] is None
    assert card["published"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["experiments", "show", "A11"], "some: 'A11' is not a registered experiment; did you mean 'A1'?"),
        (["experiments", "show"], "some: `some experiments show` needs NAME; see `some experiments show --help`"),
        (["experiments", "show", "A1", "A2"],
         "some: 'A2' is one argument too many for `some experiments show`; leave it out"),
        (["experiments", "list", "--jsn"],
         "some: --jsn is not an option of `some experiments list`; did you mean '--json'?"),
        (["experiments", "show", "--jsn"],
         "some: --jsn is not an option of `some experiments show`; did you mean '--json'?"),
        (["experiments", "lst"], "some: 'lst' is not a command of `some experiments`; did you mean 'list'?"),
        (["experimets"], "some: 'experimets' is not a command of `some`; did you mean 'experiments'?"),
        (["list"], "some: 'list' is not a command of `some`; did you mean `some experiments list`?"),
        (["xyzzy"], "some: 'xyzzy' is not a command of `some`; see `some --help`"),
        (["--versoin"], "some: --versoin is not an option of `some`; did you mean '--version'?"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == sentence + "\n"
    assert captured.out == ""


def make_parser() -> Parser:
    parser = Parser("some test", "Options of each kind.")
    parser.add_argument("text")
    parser.add_argument("--prompt")
    parser.add_argument("--compile", nargs="?", const="all")
    parser.add_argument("--json", action="store_true")
    return parser


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["a", "--prompt", "- Hello"], {"prompt": "- Hello"}),
        (["a", "--prompt", "-Hello", "--json"], {"prompt": "-Hello", "json": True}),
        (["a", "--prompt=--json"], {"prompt": "--json"}),
        (["a", "--prompt", "--json"], "argument --prompt: expected one argument"),
        (["--prompt", "--", "a"], "argument --prompt: expected one argument"),
        (["- Hello"], {"text": "- Hello"}),
        (["--", "- Hello"], {"text": "- Hello"}),
        (["--json", "--", "--prompt"], {"text": "--prompt", "json": True}),
        (["-Hello"], "-Hello is not an option of `some test`"),
        (["a", "--compile", "--jsn"], "--jsn is not an option of `some test`; did you mean '--json'?"),
        (["--promt", "a b"], "--promt is not an option of `some test`; did you mean '--prompt'?"),
    ],
)
def test_values_and_what_stands_behind_two_dashes_are_no_options(words: list[str], read: dict[str, Any] | str) -> None:
    if isinstance(read, str):
        with pytest.raises(UsageError, match=re.escape(read)):
            make_parser().parse(words)
    else:
        nothing = {"text": "a", "prompt": None, "compile": None, "json": False}
        assert vars(make_parser().parse(words)) == nothing | read


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--help"], ["usage: some COMMAND", "experiments"]),
        ([], ["usage: some COMMAND"]),
        (["experiments", "--help"], ["usage: some experiments COMMAND", "list", "show"]),
        (["experiments", "list", "--help"], ["usage: some experiments list", "--json"]),
        (["experiments", "show", "-h"], ["usage: some experiments show", "NAME", "--json"]),
    ],
)
def test_help_works_at_each_level(
    arguments: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert all(fragment in text for fragment in fragments)


def list_targets(commands: Commands) -> list[str]:
    inner = [[target] if isinstance(target, str) else list_targets(target) for _, target in commands.values()]
    return [target for targets in inner for target in targets]


@pytest.mark.parametrize("target", list_targets(COMMANDS))
def test_every_command_of_the_table_is_a_function_that_has_a_help(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        resolve_name(f"some_moe.commands.{target}")(["--help"])
    assert capsys.readouterr().out.startswith("usage: some ")


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    from some_moe import __version__

    assert main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert re.fullmatch(rf"some {re.escape(__version__)}( \(commit \w+\+?\))?, torch [\d.]+\S*, Python 3\S+\n", printed)


def test_help_ends_with_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    ends = capsys.readouterr().out.partition("exit codes:\n")[2]
    assert [line.split()[0] for line in ends.splitlines()] == ["0", "1", "2", "130", "141"]


@pytest.mark.parametrize("word", ["help", "upload", "nope"])
def test_a_word_that_is_near_none_is_answered_by_the_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"some: {word!r} is not a command of `some`; see `some --help`\n"


@pytest.mark.parametrize("arguments", [["--help"], ["experiments", "list"], ["experiments", "show", "B3"]])
def test_listings_import_nothing_heavy(arguments: list[str]) -> None:
    script = (
        f"import sys; from some_moe.cli import main; main({arguments!r}); "
        "sys.exit(' '.join({'torch', 'numpy', 'tyro', 'rich'} & set(sys.modules)) or 0)"
    )
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'yaml', 'rich'}"
    done = run_python("-c", f"import some_moe, sys; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "most_seconds"),
    [
        (["-m", "some_moe", "--help"], 0.2),
        (["-c", "import some_moe"], 0.1),
        (["-m", "some_moe", "experiments", "list"], 0.5),
        (["-m", "some_moe", "experiments", "show", "A1"], 0.5),
    ],
)
def test_what_needs_no_torch_is_there_at_once(arguments: list[str], most_seconds: float) -> None:
    """Seconds are those of a machine that imports pydantic and yaml in USUAL; a slower or busier one may take more."""

    def measure_seconds(*words: str) -> float:
        """Processor time of a command: on a quiet machine that is its time."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_python(*words).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    def measure_share() -> float:
        usual = max(USUAL, measure_seconds("-c", "import pydantic.main, yaml"))
        return measure_seconds(*arguments) * USUAL / usual

    assert min(measure_share() for _ in range(4)) < most_seconds


def test_the_package_runs_as_the_command() -> None:
    assert run_python("-m", "some_moe", "experiments", "show", "A1").stdout.startswith("A1  the v4 baseline")
    failed = run_python("-m", "some_moe", "experiments", "show", "A11")
    assert failed.returncode == 2
    assert failed.stderr == "some: 'A11' is not a registered experiment; did you mean 'A1'?\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_leaves_no_traceback(unbuffered: str) -> None:
    command = [sys.executable, "-m", "some_moe", "experiments", "list"]
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 141


def test_a_terminal_without_the_signs_gets_question_marks() -> None:
    done = run_python("-m", "some_moe", "experiments", "list", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "384?8" in done.stdout


def test_a_refusal_is_one_line_whatever_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--preset", "a\nb\x1b[31m\rc"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert not {"\x1b", "\r"} & set(message)


@pytest.mark.parametrize("experts", ["1000000000000", "99999999999999999999999"])
def test_a_model_that_no_memory_holds_gets_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], experts: str
) -> None:
    words = ["train", "--preset", "smoke", "--model.num-experts", experts, "--out", str(tmp_path / "run")]
    assert main(words) in (1, 2)
    message = capsys.readouterr().err
    assert message.startswith("some: ")
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()
