"""The demo keeps its promises: better than a trigram, and it speaks in the corpus's words. Slow."""

import json
import re
from pathlib import Path

import pytest
import torch

import some_moe
from some_moe.cli import main
from some_moe.data.tokenizer import BOS, EOS
from some_moe.stories.generator import tell_many
from some_moe.training.generation import generate_tokens

NUM_SAMPLES = 50
WORD = re.compile(r"[\w'’-]+")


def split_sentences(text: str) -> list[str]:
    """Sentences with their closing quotation mark; what follows the last full stop is a sentence too."""
    return [part.strip() for part in re.findall(r"[^.!?]+(?:[.!?]+[\"”’']?|$)", text) if part.strip(" \"”’'")]


def is_good(sentence: str, vocabulary: set[str]) -> bool:
    """Known words alone, and an end."""
    words = WORD.findall(sentence.lower())
    return bool(words) and all(word in vocabulary for word in words) and sentence.rstrip("\"”’'")[-1] in ".!?"


def test_good_sentences_are_told_from_bad_ones() -> None:
    vocabulary = {"tim", "ran", "stop", "said", "he"}
    sentences = split_sentences('Tim ran. "Stop!" said he. Tim rann. He said')
    assert sentences == ["Tim ran.", '"Stop!"', "said he.", "Tim rann.", "He said"]
    assert [is_good(sentence, vocabulary) for sentence in sentences] == [True, True, True, False, False]


@pytest.mark.slow
def test_the_demo_beats_the_trigram_and_speaks_in_the_corpus_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(2)
    run = tmp_path / "demo"
    assert main(["train", "--preset", "demo", "--out", str(run)]) == 0
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 500)
    capsys.readouterr()
    assert main(["eval", str(run), "--trigram", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["loss"] < record["trigram_loss"]

    loaded = some_moe.load(run)
    prompt = torch.full((NUM_SAMPLES, 1), BOS)
    generator = torch.Generator().manual_seed(0)
    tokens = generate_tokens(loaded.model, prompt, 400, temperature=0.8, top_p=0.95, stop=EOS, generator=generator)
    ids = torch.stack(list(tokens), dim=1).tolist()
    texts = [loaded.tokenizer.decode(row[: row.index(EOS) if EOS in row else None]) for row in ids]
    vocabulary = {word for story in tell_many(20_000) for word in WORD.findall(story.text.lower())}
    sentences = [sentence for text in texts for sentence in split_sentences(text)]
    good = sum(is_good(sentence, vocabulary) for sentence in sentences)
    with capsys.disabled():
        print(f"\nloss {record['loss']:.4f}, trigram {record['trigram_loss']:.4f}")
        print(f"{good} of {len(sentences)} sentences are good; the first story:\n{texts[0]}")
    assert len(sentences) > 5 * NUM_SAMPLES
    assert good >= 0.95 * len(sentences)
    torch.set_num_threads(1)
