"""Tasks of lm-eval on a run: three of our own, which need no network, and the harness's."""

import logging
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from some_moe.config import ConfigError, DataConfig
from some_moe.data.sources import load_corpus, read_texts
from some_moe.data.tokenizer import EOS
from some_moe.errors import FailureError, in_a_sentence
from some_moe.hf.exporting import export, is_export, quiet, tell
from some_moe.system.reading import clean

try:
    import datasets
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] not in ("lm_eval", "datasets"):
        raise
    raise ConfigError("--tasks needs lm-eval; run pip install 'some-moe[eval]'") from None

MOST_TEXTS = 200
BYTES = "some_bytes"
SHORTEST_STORY = 4  # sentences
TASKS: dict[str, dict[str, Any]] = {
    # How does the story end? The other ending is another story's.
    "some_cloze": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "label",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    # How surprising is each byte of whole stories?
    BYTES: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    },
    # Is the last sentence written word for word?
    "some_write": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{endings[label]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 48, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
    },
}


class Harness(HFLM):  # type: ignore[misc]
    """lm-eval's model for transformers, which scores a text from its first token to its last.

    The harness puts bos before a rolling window by itself: a tokenizer that does so too would make it score a bos. Our
    own task of bytes counts the end of a story, as `some eval` does; the harness's tasks do not.
    """

    add_bos_token: Any
    ends = False

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:  # noqa: ARG002
        return super().loglikelihood(requests, disable_tqdm=not sys.stderr.isatty())

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> Any:  # noqa: ARG002
        return super().generate_until(requests, disable_tqdm=not sys.stderr.isatty())

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        # Of a rolling window the harness would draw a bar for every batch.
        is_silent = disable_tqdm or override_bs is not None
        return super()._loglikelihood_tokens(requests, disable_tqdm=is_silent, override_bs=override_bs)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        found: dict[int, float] = {}
        before = self.add_bos_token
        self.add_bos_token = False
        try:
            for self.ends in (False, True):
                chosen = [request for request in requests if (request.task_name == BYTES) == self.ends]
                scores = super().loglikelihood_rolling(chosen, disable_tqdm=not sys.stderr.isatty()) if chosen else []
                found |= {id(request): score for request, score in zip(chosen, scores, strict=True)}
        finally:
            self.add_bos_token, self.ends = before, False
        return [found[id(request)] for request in requests]

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        ids: list[int] = super().tok_encode(string, *args, **kwargs)
        return [*ids, EOS] if self.ends else ids


@in_a_sentence()
def evaluate_tasks(
    run: str | Path,
    tasks: Sequence[str],
    *,
    data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    **options: Any,
) -> dict[str, dict[str, float]]:
    """Scores of a run, or of an exported folder, by task and metric.

    tasks: some_cloze, some_bytes and some_write, or names of lm-eval's. data: the texts of our own (generated stories
    that no run has been trained on). limit: of items a task. options: see `export`.
    """
    from lm_eval import simple_evaluate
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    own = [name for name in tasks if name in TASKS]
    manager = list_tasks(len(own) < len(tasks))
    known = {*TASKS, *manager.all_tasks}
    for name in tasks:
        if name not in known:
            raise ConfigError(
                f"{clean(name)!r} is no task; ours are {', '.join(TASKS)}, and `lm_eval ls tasks` lists others"
            )
    chosen = [make_task(name, [*read_stories(data)]) if name in TASKS else name for name in tasks]
    with tempfile.TemporaryDirectory() as scratch, quiet(), silenced():
        folder = Path(run)
        if not is_export(folder):
            folder = export(folder, Path(scratch) / "model", **options)
        try:
            model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # of whatever library reads which file
            raise ConfigError(f"{str(run)!r} cannot be opened ({tell(error)}); export its run anew") from error
        length = model.config.max_position_embeddings
        lm = Harness(
            pretrained=model,
            tokenizer=tokenizer,
            device=device,
            batch_size=batch_size,
            max_length=length,
            backend="causal",
        )
        try:
            found = simple_evaluate(
                model=lm, tasks=chosen, task_manager=manager, limit=limit, bootstrap_iters=0, verbosity="ERROR"
            )
        except (ConnectionError, OSError) as error:
            raise FailureError(
                f"the data of {', '.join(tasks)} cannot be read ({tell(error)}); go online, or use {', '.join(TASKS)}"
            ) from None
    return {name: dict(read_scores(scores)) for name, scores in found["results"].items()}


@cache
def list_tasks(with_theirs: bool) -> Any:
    """The harness's list of tasks; to read all of its own takes it seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=with_theirs)


@contextmanager
def silenced() -> Iterator[None]:
    """Let the harness say nothing, and look for no git repository and no hardware: that is for its own command."""
    from lm_eval import evaluator

    loggers = {name: logging.getLogger(name) for name in ("lm_eval", "transformers", "huggingface_hub")}
    levels = {name: logger.level for name, logger in loggers.items()}
    asked = {name: getattr(evaluator, name) for name in ("get_git_commit_hash", "add_env_info")}
    for logger in loggers.values():
        logger.setLevel(logging.ERROR)
    for name in asked:
        setattr(evaluator, name, lambda *_: None)
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
        for name, function in asked.items():
            setattr(evaluator, name, function)


def read_scores(scores: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers, by the metric's name."""
    for name, value in scores.items():
        metric, _, which = name.partition(",")
        if isinstance(value, int | float) and not isinstance(value, bool) and "stderr" not in name and which:
            yield metric, float(value)


def make_task(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """One of our own tasks on some texts, as the harness takes it."""
    items = [{"text": text} for text in texts] if name == BYTES else cut_stories(texts)
    if not items:
        raise ConfigError(f"{name} needs two texts of {SHORTEST_STORY} sentences and more; give another --data")
    rows = {"test": datasets.Dataset.from_list(items)}
    shared = {"task": name, "test_split": "test", "custom_dataset": lambda **_: rows}
    return shared | TASKS[name] | {"metadata": {"version": 1.0}}


def read_stories(data: str | Path | None) -> Iterable[str]:
    """The first texts of a file or folder, or of generated stories that are kept for tests."""
    if data is not None:
        texts: Iterable[str] = read_texts(data, DataConfig())
    else:
        texts = load_corpus(DataConfig(source="stories", train_subset_size=1, val_subset_size=MOST_TEXTS)).read("test")
    for _, text in zip(range(MOST_TEXTS), texts, strict=False):
        yield text


def cut_stories(texts: Sequence[str]) -> list[dict[str, Any]]:
    """All but the last sentence of each story, its ending and another's, and which of the two is its own."""
    draw = Random(0)
    stories = [re.split(r"(?<=[.!?])\s+", text.strip()) for text in texts]
    stories = [story for story in stories if len(story) >= SHORTEST_STORY]
    items = []
    for place, story in enumerate(stories):
        others = [other[-1] for number, other in enumerate(stories) if number != place and other[-1] != story[-1]]
        if others:
            label = draw.randint(0, 1)
            endings = [story[-1], draw.choice(others)]
            items.append({"context": " ".join(story[:-1]), "endings": endings[:: 1 - 2 * label], "label": label})
    return items
