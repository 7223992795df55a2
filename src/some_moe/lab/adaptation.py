"""A trained model reads a stream: each chunk is scored first, then something moves.

Gravity moves the keys, by the run's own rules. Controls move nothing (still), the keys in random directions, each as
far as gravity moved it (random), all biases (bias) or all trained parameters (dynamic) by a gradient step; a trigram
of the run's training text counts on (trigram). Padding counts in nothing here.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from some_moe.config import ConfigError, GravityConfig, RunConfig
from some_moe.data.batches import Batch, Batches, Rows, encode_rows
from some_moe.data.sources import read_texts
from some_moe.environment import describe_program
from some_moe.errors import FailureError
from some_moe.hashing import make_salt
from some_moe.lab.jobs import hide_place
from some_moe.metrics.trigram import Trigram
from some_moe.model import gravity as rules
from some_moe.model.keystore import KeyState
from some_moe.model.routing import Routing
from some_moe.system.progress import Say, say_nothing
from some_moe.training.checkpoint import describe_libraries, save_checkpoint
from some_moe.training.evaluate import Evaluation, Tally, evaluate
from some_moe.training.machine import choose_machine
from some_moe.training.optim import make_optimizer
from some_moe.training.run_folder import RunFolder, drop_nan, read_state_file
from some_moe.training.runs import Run, load
from some_moe.training.step import describe_tokens

CONTROLS = ("still", "random", "bias", "dynamic", "trigram")
RATED = ("gravity", "bias", "dynamic")
STRENGTHS = ("alpha", "alpha_floor", "beta", "beta_end", "delta", "balance_rate")
CHUNK_TOKENS, FEWEST_TOKENS, MOST_TOKENS = 2_048, 16, 65_536
TEXT_ALONE = {"data.batching": "packed", "data.loss_on": "text", "data.count_padding": False}
WITHIN = 1.96  # standard errors: 95 %
Mover = Callable[[int, Batch, tuple[Routing, ...]], None]


@dataclass(frozen=True)
class Text:
    """One text of a stream, cut into chunks."""

    name: str
    digest: str
    rows: Rows
    chunk_tokens: int

    @cached_property
    def chunks(self) -> list[Rows]:
        return cut_chunks(self.rows, self.chunk_tokens)

    @property
    def sizes(self) -> list[int]:
        """Targets of each chunk."""
        return [int(chunk.lengths.sum()) for chunk in self.chunks]


@dataclass(kw_only=True)
class Passage:
    """How one reader went through a stream."""

    who: str
    rate: float | None = None
    moves: int | None = None  # values that could move
    losses: list[float] = field(default_factory=list)  # nats a token of each chunk
    drift: list[float] = field(default_factory=list)  # after each chunk: how far keys are, in lengths of a key
    kept: list[float] = field(default_factory=list)  # nats a token of the old text: before, and after each text
    evaluations: list[Evaluation] = field(default_factory=list)  # of each text
    seconds: float = 0.0


# --- texts --------------------------------------------------------------------------------------------------


def read_text(source: str | Path, run: Run, chunk_tokens: int) -> Text:
    """All of a file, a folder or hf:OWNER/NAME, as the run reads its own text."""
    documents = list(read_texts(source, run.config.data))
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    rows = encode_rows(documents, run.tokenizer, run.config.data.seq_len, split=True)
    return Text(Path(source).name, digest, rows, chunk_tokens)


def cut_chunks(rows: Rows, chunk_tokens: int) -> list[Rows]:
    """Rows in order, as chunks of at most so many targets; a row that has more is a chunk by itself."""
    ends, filled = [], 0
    for row, length in enumerate(rows.lengths.tolist()):
        if filled and filled + length > chunk_tokens:
            ends.append(row)
            filled = 0
        filled += length
    at, borders = rows.starts, zip([0, *ends], [*ends, len(rows)], strict=True)
    return [Rows(rows.ids[at[a] : at[b]], at[a : b + 1] - at[a]) for a, b in borders]


def lay_out(chunk: Rows, config: RunConfig) -> Batch:
    """A chunk as one batch, its rows packed; they do not see each other."""
    batches = Batches(chunk, config.data, rows_a_step=1, seed=0)
    return batches.make(np.arange(batches.num_rows))


# --- reading and moving -------------------------------------------------------------------------------------


class Reader:
    """A model that reads streams, as often as it is asked to, each time as the checkpoint left it."""

    def __init__(self, run: Run, device: str = "auto") -> None:
        self.machine = choose_machine(run.config.train.override({"device": device}))
        self.config, self.first_step = run.config.override(TEXT_ALONE), run.step
        self.token_bytes = run.tokenizer.token_bytes()
        self.model = self.machine.adopt(run.model)
        self.begun = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.trained = {name for name, value in self.model.named_parameters() if value.requires_grad}
        self.steps: list[list[Tensor]] = []  # how far gravity moved each key (E,), by chunk and layer

    @property
    def states(self) -> list[KeyState]:
        return [layer.state for layer in self.model.layers if layer.state is not None]

    @torch.no_grad()
    def read(self, texts: Sequence[Text], who: str, rate: float = 1.0, kept: Rows | None = None) -> Passage:
        """Score each chunk and then move what `who` moves. kept: text that is scored before, and after each text."""
        model, device, started = self.model, self.machine.device, time.perf_counter()
        model.load_state_dict(self.begun)
        model.obey(scale(self.config.gravity, rate))
        first = [state.routing_keys.clone() for state in self.states]
        moves, move = self.find_mover(who, rate)
        found = Passage(who=who, rate=None if who == "still" else rate, moves=moves)
        found.kept = [] if kept is None else [self.score(kept)]
        for text in texts:
            tally = Tally(model, self.config, self.token_bytes, device)
            for chunk in text.chunks:
                step, batch = self.first_step + len(found.losses), lay_out(chunk, self.config).to(device)
                info = describe_tokens(batch, self.config, make_salt(model.seed, step, device))
                nats, routings = model.score(batch.inputs, batch.targets, info)
                tally.add(batch, nats, routings)
                found.losses.append(float(nats.double()[batch.real].mean()))
                move(step, batch, routings)
                pairs = zip(self.states, first, strict=True)
                away = [((state.routing_keys - old).norm(dim=-1) / old.norm(dim=-1)).mean() for state, old in pairs]
                found.drift.append(float(torch.stack(away).mean()))
            found.evaluations.append(tally.result())
            found.kept += [] if kept is None else [self.score(kept)]
        found.seconds = time.perf_counter() - started
        return found

    def score(self, rows: Rows) -> float:
        """Nats a token with everything as it is now."""
        return evaluate(self.model, rows, self.config, self.token_bytes, self.machine.device).loss

    def find_mover(self, who: str, rate: float) -> tuple[int, Mover]:
        """How many values may move, and what moves them after a chunk."""
        num_keys = sum(state.keys.numel() for state in self.states)
        if who == "gravity":
            self.steps = []
            return num_keys, self.move_keys
        if who == "random":
            self.chance = torch.Generator().manual_seed(self.config.train.seed)
            return num_keys, partial(self.scatter_keys, iter(self.steps))
        if who == "still":
            return 0, lambda *_: None
        chosen = {name for name in self.trained if who == "dynamic" or name.endswith("bias")}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in chosen)
        train = self.config.train
        optimizer = make_optimizer(
            self.model, train.override({"learning_rate": train.learning_rate * rate, "weight_decay": 0.0})
        )

        def descend(step: int, batch: Batch, _: tuple[Routing, ...]) -> None:
            salt = make_salt(self.model.seed, step, self.machine.device)
            info = describe_tokens(batch, self.config, salt, sums=False)
            total = torch.full((), float(batch.num_real), device=self.machine.device)
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = self.model.loss(batch.inputs, batch.targets, info, weights=batch.real, denominator=total).loss
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.clip_and_step(train.clip or None)

        return sum(parameter.numel() for parameter in optimizer.parameters()), descend

    def move_keys(self, step: int, _: Batch, routings: tuple[Routing, ...]) -> None:
        """A step of gravity. A pull that changes during a run has its last strength: the run is over."""
        old = [state.keys.clone() for state in self.states]
        self.model.gravity_step(routings, step, total_steps=1)
        self.steps.append([(s.keys - k).norm(dim=-1) for s, k in zip(self.states, old, strict=True)])

    def scatter_keys(self, lengths: Iterator[list[Tensor]], step: int, _: Batch, routings: tuple[Routing, ...]) -> None:
        """The same step, but for where the keys go: as far as gravity moved each, in random directions."""
        old = [{name: value.clone() for name, value in state.named_buffers()} for state in self.states]
        self.model.gravity_step(routings, step, total_steps=1)
        for state, before, length in zip(self.states, old, next(lengths), strict=True):
            directions = torch.randn(state.keys.shape, generator=self.chance)
            rules.displace(state, before, length, directions, self.model.gravity)


def scale(gravity: GravityConfig, rate: float) -> GravityConfig:
    """The rules with every strength times `rate`."""
    return gravity.override({name: getattr(gravity, name) * rate for name in STRENGTHS})


def count_on(run: Run, texts: Sequence[Text], kept: Rows) -> Passage:
    """A Kneser–Ney trigram of the run's training text reads the stream: scores a chunk, then counts it."""
    started, own, size = time.perf_counter(), run.read_data(), run.tokenizer.vocab_size
    counted = Trigram.fit_tuned(own.train.to_lists(), own.valid.to_lists(), size)
    old = kept.to_lists()
    found = Passage(who="trigram", kept=[counted.loss(old)])
    for text in texts:
        for chunk in text.chunks:
            rows = chunk.to_lists()
            found.losses.append(counted.loss(rows))
            counted = counted.extend(rows)
        found.kept.append(counted.loss(old))
    found.seconds = time.perf_counter() - started
    return found


# --- the whole ----------------------------------------------------------------------------------------------


def adapt(
    run: Run | str | Path,
    stream: Sequence[str | Path],
    *,
    controls: Sequence[str] = (),
    rates: Sequence[float] = (1.0,),
    valid: Sequence[str | Path] = (),
    keep: str | Path | None = None,
    chunk_tokens: int | None = None,
    changes: dict[str, Any] | None = None,
    out: str | Path | None = None,
    checkpoint: str = "best",
    device: str = "auto",
    say: Say = say_nothing,
) -> dict[str, Any]:
    """Let a run's keys move by its own gravity while it reads the texts of a stream, one after another.

    controls: of CONTROLS, or ("all",); still keys are always there. rates: factors on gravity's strengths and, for bias
    and dynamic, on the run's learning rate; of several each takes its best on the texts of `valid`. keep: old text,
    scored before and after each text (default: the run's valid split). changes: dotted settings of gravity. out: a new
    run folder for the moved keys. Returns all about it as one plain object; the run itself is never written.
    """
    controls = CONTROLS if tuple(controls) == ("all",) else controls
    refuse_misused({"--stream": stream, "--valid": valid, "--keep": [] if keep is None else [keep]}, controls, rates)
    folder = None if out is None else RunFolder(out)
    if folder is not None:
        folder.refuse_if_used()
    opened = open_run(run, changes or {}, checkpoint)
    chunk_tokens = choose_size(chunk_tokens, opened.config)
    texts = [read_text(source, opened, chunk_tokens) for source in stream]
    practice = [read_text(source, opened, chunk_tokens) for source in valid]
    kept = opened.read_data().valid if keep is None else read_text(keep, opened, chunk_tokens).rows
    for text in practice:
        if text.digest in {read.digest for read in texts}:
            raise ConfigError(f"{text.name} is in --valid and in --stream; choose rates by text that is not reported")
    sizes = [size for text in texts for size in text.sizes]
    if len(sizes) < 2:
        few = f"the stream has {sum(sizes):,} tokens, which is one chunk: nothing is read after keys have moved"
        raise ConfigError(f"{few}; lower --chunk-tokens {chunk_tokens}, or give more text")
    reader, tried, passages = Reader(opened, device), {}, []
    chosen: dict[str, float] = {}
    for who in ("still", "gravity", *(name for name in CONTROLS if name in controls and name != "still")):
        if len(rates) > 1 and who in RATED:
            found = {rate: mean_loss(reader.read(practice, who, rate), practice) for rate in rates}
            tried[who] = [{"rate": rate, "loss": loss} for rate, loss in found.items()]
            chosen[who] = min(found, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)
        rate = chosen.get("gravity" if who == "random" else who, rates[0])
        passage = count_on(opened, texts, kept) if who == "trigram" else reader.read(texts, who, rate, kept)
        say(f"{who}: {mean_loss(passage, texts):.4f} nats a token, {passage.seconds:.0f} s")
        passages.append(passage)
        if who == "still":
            refuse_no_number(opened, sum(passage.losses))
        if who == "gravity" and folder is not None:
            save_run(opened, reader, folder)
    program = describe_program()
    record: dict[str, Any] = drop_nan(
        {
            "run": hide_place(str(opened.path)),
            "experiment": opened.config.experiment,
            "step": opened.step,
            "seed": opened.config.train.seed,
            "out": None if out is None else hide_place(str(out)),
            "chunk_tokens": chunk_tokens,
            "texts": [{"name": text.name, "digest": text.digest, "sizes": text.sizes} for text in texts],
            "valid": [{"name": text.name, "digest": text.digest} for text in practice],
            "keep": f"valid split of {opened.path.name}" if keep is None else Path(keep).name,
            "gravity": opened.config.gravity.model_dump(mode="json"),
            "learning_rate": opened.config.train.learning_rate,
            "tried": tried,
            "readers": [describe(passage, passages[0], texts) for passage in passages],
            "device": reader.machine.describe(),
            "commit": program["commit"],
            "versions": {name: program[name] for name in ("python", "torch", "some_moe")},
        }
    )
    return record


def refuse_misused(texts: Mapping[str, Sequence[str | Path]], controls: Sequence[str], rates: Sequence[float]) -> None:
    """Say what cannot be meant, before anything is read. texts: by flag."""
    for control in controls:
        if control not in CONTROLS:
            raise ConfigError(f"--controls {control!r} is unknown; use all, or some of {', '.join(CONTROLS)}")
    for flag, text in [(flag, text) for flag, many in texts.items() for text in many]:
        if not str(text).startswith("hf:") and not Path(text).exists():
            raise ConfigError(f"{flag} {str(text)!r} does not exist; give a file or a folder")
    if not texts["--stream"]:
        raise ConfigError("--stream names no text; give one or more, in the order in which they are read")
    for rate in rates:
        if not 1e-6 <= rate <= 1e6:
            raise ConfigError(f"--rate {rate} is out of range; use 0.000001 to 1,000,000")
    if len(rates) > 1 and not texts["--valid"]:
        raise ConfigError(
            f"--rate has {len(rates)} values, and what is reported must not choose: give texts by --valid"
        )
    if len(rates) == 1 and texts["--valid"]:
        raise ConfigError("--valid chooses among rates, and there is one; give several, as --rate 0.3,1,3")


def choose_size(chunk_tokens: int | None, config: RunConfig) -> int:
    """Tokens a chunk: what is asked for, or 2,048, but no more than a step of training had."""
    if chunk_tokens is None:
        return max(FEWEST_TOKENS, min(CHUNK_TOKENS, config.data.batch_size * config.data.seq_len))
    if not FEWEST_TOKENS <= chunk_tokens <= MOST_TOKENS:
        raise ConfigError(f"--chunk-tokens {chunk_tokens} is out of range; use {FEWEST_TOKENS} to {MOST_TOKENS:,}")
    return chunk_tokens


def open_run(run: Run | str | Path, changes: dict[str, Any], checkpoint: str = "best") -> Run:
    """The run opened anew, with other rules of gravity where they are asked for; refused where no key would move."""
    run = run if isinstance(run, Run) else load(run, checkpoint=checkpoint)
    path, model = str(run.path), run.config.model
    for name in changes:
        if not name.startswith("gravity."):
            raise ConfigError(f"{name} is the run's and stays as it is; only gravity.* can be set here")
    if (run.path / "grown.json").exists():
        raise ConfigError(f"{path!r} has branches, whose keys stay where they were put; adapt its base")
    if model.ffn != "some" or model.router != "gravity":
        how = f"ffn: {model.ffn}" if model.ffn != "some" else f"router: {model.router}"
        raise ConfigError(f"{path!r} has no keys that gravity moves ({how}); give a run of router: gravity")
    config = run.config.override(changes)
    if not config.gravity.moves_keys:
        rule = "switch a rule on, as with --gravity.use-alpha true --gravity.alpha 0.01"
        raise ConfigError(f"the gravity of {path!r} is off, and its keys would stay; {rule}")
    return Run(run.path, config, checkpoint=run.checkpoint.name)


def mean_loss(passage: Passage, texts: Sequence[Text]) -> float:
    return float(np.average(passage.losses, weights=[size for text in texts for size in text.sizes]))


def describe(passage: Passage, still: Passage, texts: Sequence[Text]) -> dict[str, Any]:
    """One reader's figures; `ahead` of still keys is in nats a token, `within` its 95 % interval over chunks."""
    sizes = np.array([size for text in texts for size in text.sizes], dtype=float)
    losses, borders = np.array(passage.losses), np.cumsum([len(text.chunks) for text in texts])

    def average(part: slice) -> dict[str, float | None]:
        own, share = losses[part], sizes[part] / sizes[part].sum()
        gains = np.array(still.losses[part]) - own
        ahead, count = float(share @ gains), len(gains)
        error = math.sqrt(share**2 @ (gains - ahead) ** 2 * count / (count - 1)) if count > 1 else None
        return {"loss": float(share @ own), "ahead": ahead, "within": None if error is None else WITHIN * error}

    figures = vars(passage) | average(slice(None))
    del figures["evaluations"]
    return figures | {"texts": [average(slice(a, b)) for a, b in zip([0, *borders], borders, strict=False)]}


def score_moving(run: Run, split: str = "test", data: str | None = None, device: str = "auto") -> dict[str, Any]:
    """What `Run.evaluate` gives, of keys that move after each chunk has been scored."""
    opened = open_run(run, {})
    size, own = choose_size(None, opened.config), f"{split} split"
    rows = getattr(opened.read_data(), split) if data is None else read_text(data, opened, size).rows
    found = Reader(opened, device).read([Text(data or own, "", rows, size)], "gravity").evaluations[0]
    refuse_no_number(run, found.loss)
    return {"run": str(run.path), "step": run.step, "data": data or own, "adapt": True} | found.to_dict()


def refuse_no_number(run: Run, loss: float) -> None:
    if not math.isfinite(loss):
        raise FailureError(f"{run.path} gives no number on this text (nan or infinity); use an earlier checkpoint")


def save_run(run: Run, reader: Reader, folder: RunFolder) -> None:
    """Write the model as it is now as a run of its own; it is there whole when its config.yaml is."""
    saved = load(run.path, checkpoint=run.checkpoint.name)
    config = saved.config.override({"name": folder.path.resolve().name, "experiment": None})
    state = {name: value for name, value in read_state_file(run.checkpoint).items() if name != "hashes"}
    state |= {"best_step": run.step, "best_val_loss": None, "without_optimizer": True, "config": config.flatten()}
    state["libraries"] = describe_libraries(reader.model)
    counts = torch.zeros(len(reader.model.layers), config.model.num_experts, dtype=torch.int64)
    with folder.claim(), folder.writing():
        folder.create(run.tokenizer.to_json(), reader.machine.describe())
        save_checkpoint(folder.checkpoints, dict(reader.model.state_dict()), {"epoch_counts": counts}, state)
        folder.write_config(config)
        folder.release()
