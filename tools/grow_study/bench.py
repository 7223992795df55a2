"""One seed of one family: its base, the texts as rows, how a part of a model learns, and how a model does on each text.

Shapes: R rows.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

import some_moe
from some_moe.config import GravityConfig, ModelConfig, RunConfig, TrainConfig
from some_moe.data.batches import Batch, Batches, Rows
from some_moe.data.dataset import Dataset
from some_moe.growth.keys import write_rows
from some_moe.model.transformer import SomeLM, token_cross_entropy
from some_moe.training.evaluate import evaluation_batches, forward
from some_moe.training.machine import choose_machine
from tools.grow_study.cost import SCORED_AT_ONCE
from tools.grow_study.plan import Study
from tools.grow_study.texts import BASE, MixedRows, add_rows, data_config, join, mix_rows, open_text, take_rows

MIXED = "mixed"
LOOKS = 6  # at valid, while anything learns, evenly spaced: what did best is kept
OFF: dict[str, Any] = {"use_alpha": False, "use_beta": False, "use_delta": False}
# Attraction as a spherical running mean, no peers; keys that nobody uses seek queries; a bias keeps the load even.
SPHERE: dict[str, Any] = {"use_beta": False, "inertia": False, "alpha": 0.05, "normalize": True, "delta": 0.02}
LIBRARY: dict[str, Any] = {"trainability": "full", "score": "cosine", "center_queries": True, "query_residual": True}
Losses = dict[str, dict[str, float]]  # valid and test: of each text, of the base's mean, and of the domains' mean


def base_config(
    study: Study, family: str, seed: int, *, source: str = BASE, steps: int = 0, rate: float = 0
) -> RunConfig:
    """How a base learns, or anything from the beginning."""
    size = study.sizes
    sizes = {name: getattr(size, name) for name in ("num_layers", "d_model", "num_heads", "vocab_size")}
    sizes |= {"embedding_std": 0.3}
    experts = {name: getattr(size, name) for name in ("num_experts", "d_ffn", "top_k")}
    if family == "dense":  # as wide as what a token of the library passes
        model = ModelConfig(**sizes, ffn="dense", dense_width=size.top_k * size.d_ffn + 2 * size.d_model)
        gravity = GravityConfig(**OFF)
    elif family == "gradient":
        model = ModelConfig(**sizes, **experts, **LIBRARY, router="learned")
        gravity = GravityConfig(**OFF, balance_rate=0.01)
    else:
        model = ModelConfig(**sizes, **experts, **LIBRARY)
        gravity = GravityConfig(**SPHERE, balance_rate=0.01)
    return RunConfig(
        name=f"{source}-{family}",
        model=model,
        gravity=gravity,
        data=data_config(study.texts / source, size.seq_len, size.batch_size, study.work / "tokenizer.json"),
        train=TrainConfig(
            max_steps=steps or size.base_steps, epochs=10_000, learning_rate=rate or size.base_rate, seed=seed,
            device=study.device, fast="auto" if study.fast else "off", checkpoints="best", save_every=0,
            snapshot_every=0, sample_tokens=0, log_every=50,
        ),
    )  # fmt: skip


def make_base(study: Study, family: str, seed: int) -> dict[str, Any]:
    """Train a base, unless it is there, and let it write text of its own; returns its result."""
    run = some_moe.train(
        base_config(study, family, seed), out=study.base_run(family, seed), resume="auto", display=False
    )
    assert run.result is not None
    bench = Bench(study, family, seed)
    size = study.sizes
    rows = write_rows(bench.fresh(), size.seq_len, seed, bench.vocab_size, size.written_rows)
    place = run.path.with_suffix(".npz")
    half_made = place.with_suffix(".part.npz")
    np.savez(half_made, ids=rows.ids, starts=rows.starts)
    half_made.replace(place)
    return run.result


class Bench:
    def __init__(self, study: Study, family: str, seed: int) -> None:
        self.study, self.size, self.seed = study, study.sizes, seed
        self.run = some_moe.load(study.base_run(family, seed))
        self.config = self.run.config.override({"train.fast": "off", "train.weight_decay": 0.0, "train.warmup": 0.05})
        self.scoring = self.config.override({"data.batch_size": SCORED_AT_ONCE})
        self.machine = choose_machine(self.config.train)
        self.vocab_size = self.run.tokenizer.vocab_size
        self.seconds = 0.0  # of learning
        self.steps = 0
        self.data: dict[str, Dataset] = {}
        self.laid_out: dict[int, tuple[Rows, list[Batch]]] = {}  # rows go along, so that no others get their id

    # --- the base, and the texts ------------------------------------------------------------------------------

    @cached_property
    def base(self) -> SomeLM:
        return self.machine.adopt(self.run.model)

    def fresh(self) -> SomeLM:
        """The base once more, for something to be made of it."""
        return copy.deepcopy(self.base).compute_in(self.machine.dtype)

    def text(self, name: str) -> Dataset:
        if name not in self.data:
            config = self.config.data
            source = self.study.texts / name
            self.data[name] = open_text(config, self.config.model.vocab_size, self.run.tokenizer, source)
        return self.data[name]

    @cached_property
    def written(self) -> Rows:
        """What the base wrote itself."""
        with np.load(self.run.path.with_suffix(".npz")) as kept:
            return Rows(kept["ids"], kept["starts"])

    @cached_property
    def scored(self) -> dict[str, dict[str, Rows]]:
        """The rows of each split and text that a model is scored on; `mixed` change their text half-way."""
        study, most = self.study, self.size.score_rows
        found: dict[str, dict[str, Rows]] = {}
        for split in ("valid", "test"):
            rows = {name: getattr(self.text(name), split) for name in (*study.base, *study.domains, *study.unseen)}
            found[split] = {name: take_rows(all_, np.arange(min(most, len(all_)))) for name, all_ in rows.items()}
            found[split][MIXED] = self.mixed[split].rows
        return found

    @cached_property
    def mixed(self) -> dict[str, MixedRows]:
        """Base and domains, in that order; the base is its first text."""
        texts = [self.text(name) for name in (self.study.base[0], *self.study.domains)]
        length, number = self.size.seq_len, self.size.score_rows
        return {
            split: mix_rows([getattr(text, split) for text in texts], number, length) for split in ("valid", "test")
        }

    def everything(self, split: str = "train") -> Rows:
        """The rows of the base's text and of all domains."""
        texts = [getattr(self.text(name), split) for name in (BASE, *self.study.domains)]
        return join([rows[row] for rows in texts for row in range(len(rows))])

    def replayed(self, domain: str, share: float, *, written: bool) -> Rows:
        """A domain's training rows, and a share of old ones beside them."""
        old = self.written if written else self.text(BASE).train
        return add_rows(self.text(domain).train, old, share, self.seed)

    # --- learning ---------------------------------------------------------------------------------------------

    def learn(self, model: SomeLM, rows: Rows, rate: float, watched: Sequence[str], steps: int | None = None) -> SomeLM:
        """Let what of a model wants a gradient learn rows; of a short text no more than a few passes.

        It stops early, as `some grow` does: the model is as it was when it did best on valid rows of the watched texts.
        """
        config = self.config.override({"train.learning_rate": rate})
        on_gpu = self.machine.device.type == "cuda"
        rows_a_step = min(config.rows_a_step, max(1, len(rows) // 2))
        batches = Batches(rows, config.data, rows_a_step=rows_a_step, seed=self.seed, for_gpu=on_gpu)
        if steps is None:
            steps = min(self.size.branch_steps, self.size.most_passes * max(1, len(batches)))
        looks = {round(steps * look / LOOKS) for look in range(1, LOOKS + 1)}
        stepper = self.machine.make_stepper(model.train(), config, steps)
        began, best, lowest = time.perf_counter(), model.state_dict(), math.inf
        endless = chain.from_iterable(batches.epoch(epoch) for epoch in count())
        for step, batch in enumerate(islice(endless, steps)):
            stepper(batch, step)
            if step + 1 in looks:
                loss = sum(self.loss(model.eval(), "valid", name) for name in watched)
                if loss < lowest:
                    lowest, best = loss, {name: value.clone() for name, value in model.state_dict().items()}
                model.train()
        model.load_state_dict(best)
        if on_gpu:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - began
        self.steps += steps
        for parameter in model.parameters():
            parameter.grad = None
        return model.eval()

    # --- scoring ----------------------------------------------------------------------------------------------

    def batches_of(self, rows: Rows) -> list[Batch]:
        """The batches that rows are scored in, laid out once: a curve scores them many times."""
        kept = self.laid_out.get(id(rows))
        if kept is None:
            batches = evaluation_batches(rows, self.scoring, in_order=True).epoch(0, shuffle=False)
            kept = self.laid_out[id(rows)] = rows, [batch.to(self.machine.device) for batch in batches]
        return kept[1]

    @torch.no_grad()
    def score_rows(self, model: SomeLM, rows: Rows) -> Tensor:
        """Nats and tokens of each row's first and second half: (R, 2, 2) float64."""
        half = self.size.seq_len // 2
        found = []
        for batch in self.batches_of(rows):
            nats = token_cross_entropy(forward(model, batch, self.config, sums=False).logits, batch.targets).double()
            parts = [
                (nats * batch.real, batch.real.double())[kind][:, at]
                for at in (slice(half), slice(half, None))
                for kind in (0, 1)
            ]
            found.append(torch.stack([part.sum(1) for part in parts], 1).view(-1, 2, 2))
        return torch.cat(found).cpu()

    def loss(self, model: SomeLM, split: str, name: str) -> float:
        nats, tokens = self.score_rows(model, self.scored[split][name]).sum((0, 1)).tolist()
        return float(nats / tokens)

    def score(self, model: SomeLM) -> Losses:
        """The loss of a model on each text."""
        return self.summarize(lambda split, name: self.score_rows(model, self.scored[split][name]))

    def summarize(self, score: Callable[[str, str], Tensor]) -> Losses:
        """Losses from what `score` gives for (split, text), as `score_rows`."""
        found: Losses = {}
        for split, texts in self.scored.items():
            losses = {}
            for name in texts:
                nats, tokens = score(split, name).sum((0, 1)).tolist()
                losses[name] = nats / tokens
            found[split] = self.with_means(losses)
        return found

    def with_means(self, losses: dict[str, float]) -> dict[str, float]:
        study = self.study
        means = {"base": study.base, "gained": study.domains, "unseen": study.unseen}
        return losses | {name: float(np.mean([losses[text] for text in texts])) for name, texts in means.items()}


def row_of(point: float, losses: Losses, **more: Any) -> dict[str, Any]:
    """One point of a method's curve, as it is saved."""
    rounded = {split: {name: round(loss, 5) for name, loss in of.items()} for split, of in losses.items()}
    return {"point": point, **rounded, **more}
