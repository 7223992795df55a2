"""A finished or living run, opened again: its config, tokenizer, figures and model."""

from collections.abc import Iterator
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from some_moe.config import ConfigError, RunConfig
from some_moe.config.run import WITHOUT_EFFECT
from some_moe.errors import FailureError, in_a_sentence
from some_moe.memory import refuse_too_large
from some_moe.training.run_folder import RunFolder, read_log, read_state_file
from some_moe.views import Views

if TYPE_CHECKING:  # what needs torch is loaded when the model is asked for
    from some_moe.data.dataset import Dataset
    from some_moe.data.tokenizer import Tokenizer
    from some_moe.model.transformer import SomeLM

GIVE = "--data (with `some adapt`: --keep)"


class Run(Views):
    """What `train` and `load` return. Its parts are read when they are first asked for."""

    def __init__(
        self, path: Path, config: RunConfig, *, checkpoint: str = "best", device: str = "cpu", **more: Any
    ) -> None:
        """more: branches, how a run's are to be opened; and parts that need not be read: tokenizer, step or result."""
        self.path, self.config, self.opens_branches = path, config, more.pop("branches", {})
        self._folder, self._checkpoint, self._device = RunFolder(path), checkpoint, device
        self.__dict__.update(more)

    @cached_property
    @in_a_sentence()
    def checkpoint(self) -> Path:
        """The checkpoint that the model is read from."""
        return self._folder.choose_checkpoint(self._checkpoint)

    @cached_property
    def step(self) -> int:
        """The step at which that checkpoint was saved."""
        return int(self.checkpoint.name.removeprefix("step-"))

    @cached_property
    @in_a_sentence()
    def tokenizer(self) -> "Tokenizer":
        return self._folder.read_tokenizer()

    @cached_property
    @in_a_sentence()
    def result(self) -> dict[str, Any] | None:
        """result.json: the figures of a finished run; None where it has not finished."""
        return self._folder.read_result()

    @property
    @in_a_sentence()
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: logged steps (train_loss) and evaluations (val_loss)."""
        return read_log(self.path / "metrics.jsonl")

    @cached_property
    @in_a_sentence()
    def model(self) -> "SomeLM":
        """The model with the checkpoint's weights and keys, ready to use."""
        from some_moe.growth.opening import open_branches
        from some_moe.model.transformer import SomeLM
        from some_moe.training.checkpoint import load_model, refuse_other_model

        if not self.checkpoint.is_dir():  # a run that goes on training has removed it since
            for chosen in ("checkpoint", "step"):
                self.__dict__.pop(chosen, None)
        config = self.config
        refuse_too_large(config, self._device, training=False)
        model = open_branches(self.path, device=self._device, **self.opens_branches)
        if model is None:
            refuse_other_model(self.checkpoint, config)
            model = SomeLM(config.model, config.gravity, seed=config.train.seed, device=self._device)
        load_model(self.checkpoint, model)
        return model.eval()

    @in_a_sentence()
    def read_data(self, seq_len: int | None = None) -> "Dataset":
        """The text that the run was trained on; seq_len: one row of so many tokens a story, and the rest cut off.

        A config.yaml may come from a stranger and name any file of the reader's: what the run did not know is refused.
        """
        from some_moe.data.dataset import prepare

        data, vocab_size, known = self.config.data, self.config.model.vocab_size, read_state_file(self.checkpoint)
        found = prepare(data, vocab_size, self.tokenizer, offline=True)
        if found.digest != known.get("data_digest"):
            for name, (before, now) in self.config.differences(known.get("config") or {}).items():
                if name.startswith("data.") and name not in WITHOUT_EFFECT:
                    there = f"{str(self.path)!r} was trained with {name} {before}"
                    raise ConfigError(f"{there}, config.yaml now says {now}; restore it, or give the text with {GIVE}")
            raise ConfigError(
                f"data.source {data.source!r} is not what {str(self.path)!r} was trained on: another text, or one "
                f"that was changed; restore it, or give the text with {GIVE}"
            )
        if seq_len is None or (seq_len == data.seq_len and data.long != "split"):
            return found
        return prepare(data.override({"seq_len": seq_len, "long": "cut"}), vocab_size, self.tokenizer, offline=True)

    @in_a_sentence()
    def evaluate(
        self,
        split: str = "test",
        *,
        data: str | Path | None = None,
        trigram: bool = False,
        device: str = "auto",
    ) -> dict[str, Any]:
        """Honest losses on a split of the run's own data, or on all text of `data`: a file, a folder, or hf:OWNER/NAME.

        Keys stay still; `some_moe.adapt` lets them move. trigram: score a Kneser–Ney trigram of the train split too.
        device: where the model is brought to be scored, and stays.
        """
        from some_moe.data.batches import encode_rows
        from some_moe.data.sources import read_texts
        from some_moe.training.evaluate import evaluate
        from some_moe.training.machine import choose_machine

        config, tokenizer, model = self.config, self.tokenizer, self.model
        machine = choose_machine(config.train.override({"device": device}))
        own = self.read_data() if data is None or trigram else None
        if data is None:
            rows = getattr(own, split)
        else:
            rows = encode_rows(read_texts(data, config.data), tokenizer, config.data.seq_len, split=True)
        model = machine.adopt(model)
        found = evaluate(model, rows, config, tokenizer.token_bytes(), machine.device)
        source = f"{split} split" if data is None else str(data)
        if not isfinite(found.loss):
            raise FailureError(f"{self.path} gives no number on {source} (nan or infinity); use an earlier checkpoint")
        record = {"run": str(self.path), "step": self.step, "data": source, "adapt": False} | found.to_dict()
        if own is not None and trigram:
            from some_moe.metrics.trigram import Trigram

            counted = Trigram.fit_tuned(own.train.to_lists(), own.valid.to_lists(), tokenizer.vocab_size)
            record |= {"trigram_loss": counted.loss(rows.to_lists()), "trigram_discount": counted.discount}
        return record

    def generate(self, prompt: str = "", max_tokens: int = 300, **options: Any) -> Iterator[str]:
        """Yield the continuation of a prompt, piece by piece. Options: seed, stop (texts), and those of
        `training.generation.Sampling`: temperature, top_p, top_k, repetition_penalty."""
        from some_moe.training.generation import stream_text

        pieces = stream_text(self.model, self.tokenizer, prompt, max_tokens, **options)

        def stream() -> Iterator[str]:
            with in_a_sentence():
                yield from pieces

        return stream()

    @in_a_sentence()
    def generate_texts(self, prompt: str = "", count: int = 8, max_tokens: int = 300, **options: Any) -> list[str]:
        """So many continuations of a prompt, told side by side, as `generate` tells them by seed, seed + 1, …"""
        from some_moe.training.generation import MOST_ROWS, stream_texts

        seed, texts = options.pop("seed", 0), [""] * count
        for first in range(0, count, MOST_ROWS):
            seeds = [seed + number for number in range(first, min(count, first + MOST_ROWS))]
            pieces = stream_texts(self.model, self.tokenizer, prompt, max_tokens, seeds=seeds, **options)
            for number, piece in pieces:
                texts[first + number] += piece
        return texts


@in_a_sentence()
def load(
    path: str | Path,
    *,
    checkpoint: str = "best",
    device: str = "cpu",
    base: str | Path | None = None,
    favour: float | None = None,
) -> Run:
    """Open a run folder, ready to use.

    path: the folder. checkpoint: best, last or step-N. device: where its model is to be (cpu, cuda, cuda:N). base: of a
    run with branches, where its base is now, if it was moved. favour: of such a run, how readily branches are chosen.
    """
    folder = RunFolder(path)
    config = folder.read_config()
    branches = {"base": base, "favour": favour}
    run = Run(folder.path, config, checkpoint=checkpoint, device=device, branches=branches)
    run.checkpoint  # noqa: B018 - one that is not there is refused now
    return run
