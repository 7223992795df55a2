"""A bounded share of the campaign: the same cases each time. `make fuzz` runs the long form."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import mutators
from tests.fuzz.case import GOOD, Bench, Verdict
from tests.fuzz.pages import find_fault, find_markup
from tests.fuzz.targets import BY_NAME, REPORT, SHOWN, TRACE, TYPED, VALUES, Command, show_text, to_word

SEED = 16
ROOT = Path(__file__).parents[2]
POLICY = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; script-src 'none'\">"
EXAMPLES = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def start_campaign(*words: str) -> subprocess.CompletedProcess[str]:
    """The campaign in a process of its own: it forks, limits memory, and hides the GPU."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.campaign", "--seed", str(SEED), "--jobs", "1", *words],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip


# --- mutated files ------------------------------------------------------------------------------------------


def test_every_command_answers_well_to_a_hundred_mutated_files() -> None:
    done = start_campaign("--cases", "100", "--light")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_every_command_answers_well_to_thousands_of_mutated_files() -> None:
    done = start_campaign("--cases", "1300", "--seed", "17")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# --- command lines, and texts on pages ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A place to try commands in, with one small run."""
    base = tmp_path_factory.mktemp("fuzz") / "base"
    done = start_campaign("--light", "--material", str(base))
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_CACHE", "")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(base)
        with Bench(base, "tests") as made:
            yield made
        shutil.rmtree((base / "devices").resolve())


def assert_good(verdict: Verdict) -> None:
    told = f"{verdict.kind}: {verdict.place}\n{verdict.damage}\n{verdict.command}\n{verdict.answer}"
    assert verdict.kind in GOOD, told


@st.composite
def command_lines(draw: st.DrawFn, options: dict[str, list[str]]) -> list[str]:
    """A command as it should be, then some of its options with values that make no sense."""
    command = draw(st.sampled_from([name for name in TYPED if name not in ("train", "bench layer", "bench step")]))
    known = [option for option in options[command] if option not in ("--draw-only", "--no-analyze", "--dry-run")]
    values = st.sampled_from(VALUES) | st.text(max_size=20) | st.integers().map(str) | st.floats().map(str)
    typed = list(TYPED[command])
    for _ in range(draw(st.integers(1, 3))):
        value = to_word(draw(values)).replace("/", "")  # a path would be written to
        option = draw(st.sampled_from([*known, "--x", "--"]))
        typed += draw(st.sampled_from([[option, value], [f"{option}={value}"], [value], [option]]))
    return [*command.split(), *typed]


@pytest.mark.slow
def test_command_lines_without_sense_are_answered_well(bench: Bench) -> None:
    options = json.loads((bench.base / "about.json").read_text(encoding="utf-8"))["options"]

    @settings(EXAMPLES, max_examples=200)
    @given(command_lines(options))
    def answers_well(words: list[str]) -> None:
        assert_good(bench.try_out(BY_NAME["words"], Command(words=tuple(words), writes=("",)), lambda _: "typed"))

    answers_well()


TEXTS = st.lists(st.sampled_from(mutators.TEXTS) | st.text(st.characters(exclude_categories=())), max_size=3).map(
    "".join
)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["trace", *SHOWN])
def test_whatever_a_text_holds_a_page_shows_it_as_text(bench: Bench, where: str) -> None:
    pytest.importorskip("matplotlib")
    command = TRACE[0] if where == "trace" else REPORT[0]

    @settings(EXAMPLES, max_examples=40)
    @given(TEXTS)
    def shows_text(text: str) -> None:
        place = lambda words: show_text(bench.case, words, where, text.replace("\0", ""))  # noqa: E731
        assert_good(bench.try_out(BY_NAME["pages"], command, place))

    shows_text()


# --- the harness itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutator", ["AS_JSON", "AS_JSONL", "AS_YAML", "AS_TENSORS", "AS_TOKENIZER", "AS_TEXT"])
def test_a_mutator_changes_whatever_it_is_given_and_follows_from_its_seed(mutator: str) -> None:
    mutate: mutators.Mutator = getattr(mutators, mutator)
    good = b'{"a": [1, 2.5, {"b": "c"}], "d": null}'
    first, second = ([mutate(good, Random(seed)) for seed in range(300)] for _ in range(2))
    assert first == second
    assert len({data for data, _ in first}) > 100
    for data, _ in first:
        mutate(data, Random(0))  # what was mutated can be mutated again


def test_tensors_whose_header_is_edited_keep_their_form() -> None:
    good = mutators.join_tensors(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8))
    changed = [mutators.mutate_tensors(good, Random(seed)) for seed in range(200)]
    assert any("nan" in words for _, words in changed)
    readable = [data for data, _ in changed if data[:1] != b""]
    assert len(readable) == 200
    assert mutators.split_tensors(good)[0]["w"]["shape"] == [2]


@pytest.mark.parametrize(
    "page",
    [
        "<p>no policy",
        f"{POLICY}<script>alert(1)</script>",
        f"{POLICY}<img src=x onerror=alert(1)>",
        f"{POLICY}<img src='https://example.org/x.png'>",
        f"{POLICY}<iframe srcdoc='x'></iframe>",
        f"{POLICY}<a href='javascript:alert(1)'>x</a>",
        POLICY.replace("'none'\"", "'sha256-AAAA'\""),
    ],
)
def test_a_page_that_could_do_harm_is_found_out(page: str) -> None:
    assert find_fault(page, []) is not None


def test_a_harmless_page_is_not() -> None:
    assert find_fault(f"{POLICY}<p>&lt;script&gt;<img src='data:,'><a href='report.md'>x</a>", []) is None
    assert find_markup("`<script>` and \\<script> and\n```\n<img>\n```") is None
    assert find_markup("see <img src=x>") is not None
