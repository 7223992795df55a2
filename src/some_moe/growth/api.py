"""`some_moe.grow`, `merge` and `prune`: branches are made, put together and taken out. The base is never written."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from some_moe.config import ConfigError, RunConfig
from some_moe.data.dataset import Dataset, prepare, settle_data
from some_moe.environment import describe_device
from some_moe.errors import in_a_sentence
from some_moe.growth.context import Context, let_speak, set_prior, sum_rows
from some_moe.growth.keys import Queries, calibrate, collect_queries, score_margins, spread_keys
from some_moe.growth.library import BranchedLibrary, rest, widen, widen_config
from some_moe.growth.opening import GROWN, VERSION, digest_base, let_learn, open_base, read_grown, refuse_favour
from some_moe.growth.sharing import keep_rows, measure_curve
from some_moe.model.transformer import SomeLM
from some_moe.sinks.display import Display
from some_moe.system.reading import read_fitting
from some_moe.system.records import Branch, Grown
from some_moe.training import loop
from some_moe.training.checkpoint import read_state, save_checkpoint
from some_moe.training.machine import choose_machine
from some_moe.training.run_folder import CURE, RunFolder, read_state_file
from some_moe.training.runs import Run, load

LOOKS_BACK = 0.7  # weight of what a word says
HEAD_RANK = 32
SHARE = 0.02  # of kept tokens that may use a new expert, at favour 0
ONLY = ".library.branches.0."
PLACED = (".state.keys", ".state.bias", ".state.smoothed")  # a row an expert; the other rows of a key store are counts
# Neither the fast model nor what shares a model out among processes knows branches.
PLAIN: dict[str, Any] = {
    "train.fast": "off", "train.kernel": "auto", "train.fsdp": False, "train.expert_parallel": "off"
}  # fmt: skip
DEFAULTS: dict[str, Any] = {"train.learning_rate": 6e-4, "train.weight_decay": 0.0, "train.warmup": 0.05}


@in_a_sentence()
def grow(
    run: str | Path,
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    experts: int = 16,
    steps: int = 400,
    trainability: str = "full",
    lora_rank: int = 8,
    looks_back: float = LOOKS_BACK,
    head_rank: int = HEAD_RANK,
    keep: str | Path | None = None,
    share: float = SHARE,
    favour: float = 0.0,
    changes: dict[str, Any] | None = None,
    resume: bool = False,
    display: Display | bool = True,
) -> Run:
    """Grow a branch of new experts on a text; nothing of the base changes. Returns the grown run.

    run: the base. data: what the branch learns. out: the new run folder (runs/NAME-grown). experts: new ones in every
    layer. steps: of training. trainability, lora_rank: how new experts learn, as in `ModelConfig`. looks_back: weight
    of the text before a token in whether the branch serves it; 0 is each token alone. head_rank: of the update of the
    head that a branch has; 0 is none. keep: text of the kind that must not be lost; without it the base writes some
    itself. share: of that text's tokens, how many may use a new expert. favour: moves that share, up or down, later
    too. changes: dotted settings of data and training, as {"train.learning_rate": 3e-4}. resume: go on with the run in
    `out` if it has begun. display: False says nothing.
    """
    if isinstance(display, bool):
        display = Display(speaks=display)
    folder = RunFolder(Path(out) if out is not None else Path("runs") / f"{Path(run).name}-grown")
    if resume and folder.exists():
        return _finish(loop.resume(folder, display, folder.newest_checkpoint()), keep, display)
    if data is None:
        raise ConfigError("a branch grows on a text; give a file or a folder with --data")
    if not 0 < share < 1:
        raise ConfigError(f"--share {share} is out of range; use more than 0 and less than 1")
    refuse_favour(favour)
    folder.refuse_if_used()
    branch = make_branch(folder.path.resolve().name, experts, trainability, lora_rank, looks_back, head_rank)
    base = load(run)
    refuse_unfit(base)
    config = branch_config(base.config, branch, data, steps, changes or {})
    base = load(run, device=str(choose_machine(config.train).device), checkpoint=base.checkpoint.name)
    new = prepare(config.data, config.model.vocab_size, base.tokenizer, say=display.say)
    config = fit_epochs(config, new, steps)
    kept, words = keep_rows(base, keep)
    queries, known = (collect_queries(base.model, rows, base.config) for rows in (new.train, kept))
    model = widen(base.model, [branch])
    reached = begin_branch(model, queries, known, share, config.train.seed)
    grown = Grown(
        format_version=VERSION,
        base=os.path.relpath(base.path.resolve(), folder.path.resolve()),
        base_step=base.step,
        base_digest=digest_base(base),
        branches=[branch],
        favour=favour,
        kept=words,
    )
    trainer = loop.start(config, folder, display, base.checkpoint, grown=(let_learn(model), grown.model_dump()))
    added = f"{experts} new experts in each of {len(model.layers)} layers"
    display.say(f"{added}, {model.count_parameters()[0]:,} parameters trained; {words} is kept")
    display.say(f"{reached:.1%} of the new text's tokens find them, and {share:.1%} of the kept text's may")
    if reached < 2 * share:
        cure = "score: cosine and center_queries: true" if base.config.model.score == "dot" else "longer training"
        display.say(f"the base hardly tells the two apart: a base with {cure} does better, or a higher --share")
    return _finish(trainer, keep, display)


def make_branch(
    name: str, experts: int, trainability: str, lora_rank: int, looks_back: float = 0.0, head_rank: int = 0
) -> Branch:
    if trainability not in ("full", "lora"):
        raise ConfigError(f"--trainability {trainability!r} is unknown; use full or lora")
    for flag, value, most in (("--experts", experts, 65_536), ("--lora-rank", lora_rank, 4_096)):
        if not 1 <= value <= most:
            raise ConfigError(f"{flag} {value} is out of range; use 1 to {most:,}")
    if not 0 <= head_rank <= 4_096:
        raise ConfigError(f"--head-rank {head_rank} is out of range; use 0 (none) to 4,096")
    if not 0 <= looks_back <= 1000:
        raise ConfigError(f"--looks-back {looks_back} is out of range; use 0 (not at all) to 1,000")
    how = {"trainability": trainability, "lora_rank": lora_rank, "looks_back": looks_back, "head_rank": head_rank}
    return Branch(name=name, experts=experts, **how)  # type: ignore[arg-type]


def refuse_unfit(base: Run) -> None:
    """Say why a run cannot have branches."""
    model = base.config.model
    if (base.path / GROWN).exists():
        of = read_grown(base.path).base
        raise ConfigError(f"{str(base.path)!r} has branches already; grow its base ({of}) and merge the two")
    if model.ffn != "some" or model.router not in ("gravity", "learned"):
        how = f"ffn: {model.ffn}" if model.ffn != "some" else f"router: {model.router}"
        raise ConfigError(
            f"{str(base.path)!r} has no keys that could be added to ({how}); grow a run of router: gravity"
        )
    if model.top_k == 1:  # its gate is the share among all experts
        raise ConfigError(
            f"{str(base.path)!r} has top_k 1, where new experts change old gates; grow a run of top_k 2 or more"
        )
    for study in ("shared_down", "gains"):
        if getattr(model, study):
            raise ConfigError(
                f"{str(base.path)!r} is a study ({study}) whose experts cannot be copied; grow another run"
            )


def branch_config(base: RunConfig, branch: Branch, data: str | Path, steps: int, changes: dict[str, Any]) -> RunConfig:
    """How a branch is trained: as its base was, but for what differs."""
    if not 1 <= steps <= 10**7:
        raise ConfigError(f"--steps {steps} is out of range; use 1 to 10,000,000")
    for name in changes:
        if not name.startswith(("train.", "data.")):
            raise ConfigError(f"{name} is the base's and stays as it is; only data.* and train.* can be set here")
        if name in PLAIN and str(changes[name]) != str(PLAIN[name]):
            raise ConfigError(f"{name} {changes[name]} is not to be had where a branch is grown; leave it out")
    whole = {
        "data.source": str(data),
        "data.train_subset_size": None,
        "data.val_subset_size": None,
        "data.long": "auto",
    }
    text = {"name": branch.name, "experiment": None} | whole
    parts = {"model": widen_config(base.model, [branch]), "gravity": rest(base.gravity)}
    own = text | DEFAULTS | {"train.max_steps": steps} | changes | PLAIN
    return settle_data(base.model_copy(update=parts).override(own))


def fit_epochs(config: RunConfig, data: Dataset, steps: int) -> RunConfig:
    """As many passes over the text as the steps need."""
    an_epoch = config.override({"train.epochs": 1, "train.max_steps": None}).count_steps(len(data.train))
    return config.override({"train.epochs": max(1, -(-steps // max(1, an_epoch)))})


@torch.no_grad()
def begin_branch(model: SomeLM, new: Queries, kept: Queries, share: float, seed: int) -> float:
    """Find a new branch's keys in the queries of its text, its beginning in the nearest experts, and its bias or prior.

    Returns the share of the new text's tokens, over all layers, that choose any of its experts; of a branch that looks
    back, its mean share of that text.
    """
    generator = torch.Generator().manual_seed(seed)
    reached = 0.0
    for layer, queries, known in zip(model.layers, new.layers, kept.layers, strict=True):
        state, library = layer.state, layer.library
        assert state is not None
        assert isinstance(library, BranchedLibrary)
        branch, num_old = library.branches[-1], library.up.shape[0]
        count = len(state.keys) - num_old
        if len(queries) < count:
            raise ConfigError(
                f"{len(queries)} tokens of text are too few for {count} experts; give more text, or lower --experts"
            )
        keys = spread_keys(queries, count, generator)
        near = (keys @ torch.nn.functional.normalize(state.routing_keys[:num_old].float(), dim=-1).T).argmax(-1)
        for place in (state.keys, state.smoothed):
            if place is not None:
                place[num_old:].copy_(keys * place[:num_old].norm(dim=-1).mean())
        branch.begin(library.base, near, generator)  # type: ignore[operator]
        if model.context is None:
            state.bias[num_old:] = calibrate(layer, known, num_old, share)
            chosen = score_margins(layer, queries, num_old) + state.bias[num_old:] > 0
            reached += float(chosen.any(1).double().mean()) / len(model.layers)
    if isinstance(model.context, Context):
        let_speak(model.context, new.counts, kept.counts)
        set_prior(model.context, sum_rows(model.context, kept.ids, kept.lengths), share)
        reached = float(model.context.share(sum_rows(model.context, new.ids, new.lengths)).mean(0)[-1])
    return reached


def _finish(trainer: loop.Trainer, keep: str | Path | None, display: Display) -> Run:
    result = loop.train(trainer)
    run = load(trainer.folder.path)
    display.say("measuring how old and new share …")
    measure_curve(run, keep)
    return Run(run.path, run.config, result=result)


# --- putting together, and taking out ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One branch: its record, and its tensors as they lie in a model of that branch alone."""

    branch: Branch
    tensors: dict[str, Tensor]

    @cached_property
    def digest(self) -> str:
        found = hashlib.sha256()
        for name, value in sorted(self.tensors.items()):
            found.update(name.encode() + value.contiguous().numpy().tobytes())
        return found.hexdigest()


def take_apart(path: Path, base: RunConfig) -> list[Part]:
    """The branches of a run, as they were saved. One that was grown is called by its folder's name."""
    grown, folder = read_grown(path), RunFolder(path)
    place = folder.choose_checkpoint("best")
    read_state(place)
    empty = widen(SomeLM(base.model, base.gravity, device="meta"), grown.branches)
    saved = read_fitting(place / "model.safetensors", empty.state_dict(), CURE)
    parts, first = [], base.model.num_experts
    for number, branch in enumerate(grown.branches):
        mark, rows = f".library.branches.{number}.", slice(first, first + branch.experts)
        own = {name.replace(mark, ONLY): value for name, value in saved.items() if mark in name}
        own |= {name: value[rows].clone() for name, value in saved.items() if name.endswith(PLACED)}
        name = branch.name if grown.merged else path.resolve().name
        parts.append(Part(branch.model_copy(update={"name": name}), own))
        first += branch.experts
    return parts


@torch.no_grad()
def put_together(model: SomeLM, parts: list[Part]) -> SomeLM:
    """Widen a base by branches, in that order, with their experts and keys."""
    widen(model, [part.branch for part in parts])
    state, first = model.state_dict(), model.layers[0].library.up.shape[0]
    for number, part in enumerate(parts):
        rows = slice(first, first + part.branch.experts)
        for name, value in part.tensors.items():
            place = (
                state[name][rows]
                if name.endswith(PLACED)
                else state[name.replace(ONLY, f".library.branches.{number}.")]
            )
            place.copy_(value)
        first += part.branch.experts
    return model


@in_a_sentence()
def merge(runs: Sequence[str | Path], out: str | Path, *, base: str | Path | None = None, favour: float = 0.0) -> Run:
    """Put the branches of several runs side by side, in one run. The order in which they are given is of no account.

    runs: grown or merged ones, all of one base. out: the new run folder. base: where it is now, if it was moved.
    favour: how readily branches are chosen; 0 is as they were grown.
    """
    refuse_favour(favour)
    paths = [Path(run) for run in runs]
    if not paths:
        raise ConfigError("nothing to merge; give the folders of one or more grown runs")
    records = [read_grown(path) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if record.base_digest != records[0].base_digest:
            raise ConfigError(
                f"{str(path)!r} was grown on another base than {str(paths[0])!r}; merge branches of one base"
            )
    place = open_base(paths[0], records[0], base)
    parts = [(part, path) for path in paths for part in take_apart(path, place.config)]
    seen: dict[str, Path] = {}
    for part, path in parts:
        for word in (part.branch.name, part.digest):
            if word in seen:
                raise ConfigError(
                    f"the branch {part.branch.name!r} of {str(path)!r} is in {str(seen[word])!r} too; give each branch "
                    "once, under a folder's name of its own"
                )
            seen[word] = path
    return write_merged(place, [part for part, _ in parts], Path(out), favour)


@in_a_sentence()
def prune(run: str | Path, branch: str, out: str | Path, *, base: str | Path | None = None) -> Run:
    """Take a branch out of a run: what remains is what there would be had it never been added.

    run: a merged one. branch: its name there. out: the new run folder. base: where the base is now, if it was moved.
    """
    path = Path(run)
    record = read_grown(path)
    place = open_base(path, record, base)
    parts = take_apart(path, place.config)
    rest_of = [part for part in parts if part.branch.name != branch]
    if len(rest_of) == len(parts):
        names = ", ".join(part.branch.name for part in parts)
        raise ConfigError(f"{str(path)!r} has no branch {branch!r}; it has {names}")
    if not rest_of:
        raise ConfigError(f"{branch!r} is the only branch of {str(path)!r}; without it, it is its base: {place.path}")
    return write_merged(place, rest_of, Path(out), record.favour)


def write_merged(base: Run, parts: list[Part], out: Path, favour: float) -> Run:
    """A run folder with these branches of a base. They stand in the order of their names: one set, one function."""
    parts = sorted(parts, key=lambda part: part.branch.name)
    branches = [part.branch for part in parts]
    folder = RunFolder(out)
    folder.refuse_if_used()
    changes = {"model": widen_config(base.config.model, branches), "gravity": rest(base.config.gravity)}
    config = base.config.model_copy(update=changes).override({"name": out.resolve().name, "experiment": None} | PLAIN)
    state = read_state_file(base.checkpoint)
    about = {"libraries": [], "data_digest": state["data_digest"], "config": config.flatten()}
    grown = Grown(
        format_version=VERSION,
        base=os.path.relpath(base.path.resolve(), out.resolve()),
        base_step=base.step,
        base_digest=digest_base(base),
        branches=branches,
        favour=favour,
        merged=True,
    )
    model = put_together(base.model, parts)
    with folder.claim(), folder.writing():
        device = describe_device(torch.device("cpu"))
        folder.create(base.tokenizer.to_json(), device, grown.model_dump())
        state = asdict(loop.Progress()) | about
        save_checkpoint(folder.checkpoints, dict(model.state_dict()), {}, state)  # not trained: no optimizer
        folder.write_config(config)
        folder.release()
    return load(out)
