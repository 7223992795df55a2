"""Tasks of lm-eval: their figures are ours where they mean the same, and nothing is fetched."""

import json
from pathlib import Path

import datasets
import pytest
import torch
from huggingface_hub import constants

import some_moe
from some_moe.cli import main
from some_moe.hf import evaluation, export
from some_moe.hf.evaluation import MOST_TEXTS, TASKS, Harness, cut_stories, evaluate_tasks, read_stories
from tests.hf.test_models import small_config
from tests.shared.typed import refused
from tests.shared.untrained import write_run

# To import the harness takes longer than most tests; its warnings are its own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rows long enough for every story; one token is a byte or few."""
    config = small_config("plain").override({"data.seq_len": 4096})
    return write_run(tmp_path_factory.mktemp("run") / "small", config)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    stories = [*read_stories(None)][:5]
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*stories, "naïve ☃", "a <|eos|> b"]))
    return path


def test_bits_per_byte_are_those_of_some_eval(run: Path, texts: Path) -> None:
    ours = some_moe.load(run).evaluate(data=texts, device="cpu")
    theirs = evaluate_tasks(run, ["some_bytes"], data=texts)["some_bytes"]
    assert theirs["bits_per_byte"] == pytest.approx(ours["bits_per_byte"], abs=5e-5)


def test_a_cloze_is_scored_by_what_the_model_finds_likelier(run: Path, texts: Path) -> None:
    """The harness's accuracy against sums of log-probabilities by hand, bos first and once."""
    loaded = some_moe.load(run)
    items = cut_stories([json.loads(line)["text"] for line in texts.read_text().splitlines()])
    assert len(items) == 5
    right = 0
    for item in items:
        totals = []
        for ending in item["endings"]:
            context = loaded.tokenizer.encode(item["context"])
            whole = loaded.tokenizer.encode(f"{item['context']} {ending}")
            ids = torch.tensor([[1, *whole]])
            with torch.no_grad():
                shares = loaded.model(ids).logits.log_softmax(-1)[0]
            first = len(context)
            totals.append(sum(float(shares[n, ids[0, n + 1]]) for n in range(first, len(whole))))
        right += int(totals.index(max(totals)) == item["label"])
    found = evaluate_tasks(run, ["some_cloze"], data=texts)["some_cloze"]
    assert found["acc"] == pytest.approx(right / len(items))


def test_generated_stories_are_those_kept_for_tests_and_each_has_two_endings() -> None:
    stories = [*read_stories(None)]
    assert len(stories) == MOST_TEXTS
    items = cut_stories(stories)
    assert {item["label"] for item in items} == {0, 1}
    for item, story in zip(items, (s for s in stories if s.split()), strict=False):
        assert len(set(item["endings"])) == 2
        own = item["endings"][item["label"]]
        assert any(s.endswith(own) and s.startswith(item["context"][:20]) for s in stories), story


def test_the_command_prints_every_task(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(run, tmp_path / "out")
    assert main(["eval", str(tmp_path / "out"), "--tasks", ",".join(TASKS), "--limit", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    assert {name: sorted(scores) for name, scores in found.items()} == {
        "some_cloze": ["acc", "acc_norm"],
        "some_bytes": ["bits_per_byte", "byte_perplexity"],
        "some_write": ["exact_match"],
    }
    assert main(["eval", str(run), "--tasks", "some_bytes", "--limit", "1"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out


def test_bad_input_is_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ("eval", str(run))
    assert "'nope' is no task; ours are some_cloze" in refused(capsys, *start, "--tasks", "nope")
    assert "exclude each other" in refused(capsys, *start, "--tasks", "some_bytes", "--adapt")
    assert "--limit 0 is out of range" in refused(capsys, *start, "--tasks", "some_bytes", "--limit", "0")
    assert "--limit 3 is of --tasks" in refused(capsys, *start, "--limit", "3")
    assert "names none, or one twice" in refused(capsys, *start, "--tasks", ",")
    assert "is no name of a task" in refused(capsys, *start, "--tasks", "some bytes")
    assert "is not a run" in refused(capsys, "eval", str(run / "none"), "--tasks", "some_bytes")
    short = str(run.parent / "short.txt")
    Path(short).write_text("One. Two. Three. Four.")
    assert "needs two texts of 4 sentences" in refused(capsys, *start, "--tasks", "some_cloze", "--data", short)


def test_an_exported_folder_that_was_changed_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(run, tmp_path / "out")
    for name in ("tokenizer.json", "model.safetensors"):
        file = tmp_path / "out" / name
        file.write_bytes(file.read_bytes()[:100])
        told = refused(capsys, "eval", str(tmp_path / "out"), "--tasks", "some_bytes")
        assert "cannot be opened (" in told
        assert "export its run anew" in told


def test_without_a_network_a_task_of_the_harness_is_one_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for place in (datasets.config, constants):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    assert main(["eval", str(run), "--tasks", "lambada_openai"]) == 1
    told = capfd.readouterr().err
    assert told.startswith("some: the data of lambada_openai cannot be read (")
    assert told.endswith("go online, or use some_cloze, some_bytes, some_write\n")
    assert told.count("\n") == 1


def test_the_harness_leaves_its_own_tasks_without_an_end(run: Path, tmp_path: Path) -> None:
    """A task that is not ours is scored as the harness scores it for all models: without eos."""
    from lm_eval.api.instance import Instance
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(run, tmp_path / "out")
    loaded, text = some_moe.load(run), "abc defg hab"
    model, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    lm = Harness(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=2, max_length=64, backend="causal")
    requests = [
        Instance("loglikelihood_rolling", {}, (text,), 0, metadata=(name, 0, 1)) for name in ("wiki", evaluation.BYTES)
    ]
    found = lm.loglikelihood_rolling(requests, disable_tqdm=True)
    ids = torch.tensor([[1, *loaded.tokenizer.encode(text), 2]])
    with torch.no_grad():
        shares = loaded.model(ids).logits.log_softmax(-1)[0]
    each = [float(shares[n, ids[0, n + 1]]) for n in range(ids.shape[1] - 1)]
    assert found == pytest.approx([sum(each[:-1]), sum(each)], abs=1e-3)
