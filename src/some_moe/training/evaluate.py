"""How good a model is: nats per real token first, and what the published protocol would have printed beside it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from some_moe.config import RunConfig
from some_moe.data.batches import Batch, Batches, Rows
from some_moe.data.tokenizer import BOS
from some_moe.hashing import make_salt
from some_moe.metrics.usage import gate_entropies, summarize_usage
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import ModelOutput, SomeLM
from some_moe.parallel.process_group import SINGLE, ProcessGroup
from some_moe.training.step import describe_tokens

LN2 = math.log(2)

Scorer = Callable[[Tensor, Tensor, TokenInfo], tuple[Tensor, tuple[Routing, ...]]]  # as `SomeLM.score`


def forward(model: SomeLM, batch: Batch, config: RunConfig, step: int = 0, *, sums: bool = True) -> ModelOutput:
    """Run the model on a batch with the config's convention of what counts. sums: for what gravity reads."""
    salt = make_salt(model.seed, step, batch.inputs.device)
    output: ModelOutput = model(batch.inputs, describe_tokens(batch, config, salt, sums=sums))
    return output


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Losses over a split. The padded ones exist only where padding is part of the training target."""

    loss: float  # nats per real token
    loss_on_padding: float | None
    loss_padded: float | None  # r·loss + (1−r)·loss_on_padding, r the share of text: the v2–v4 convention
    perplexity: float
    bits_per_byte: float
    num_tokens: int  # real targets scored
    num_bytes: int  # bytes of text they stand for
    text_share: float  # r: share of the positions that are text
    layers: tuple[dict[str, Any], ...]  # usage of each SoME layer
    stories: dict[str, list[Any]] | None = None  # nats and real tokens of each document, in order

    def to_dict(self) -> dict[str, Any]:
        """All but the stories, which a log would be full of."""
        return {name: value for name, value in asdict(self).items() if name != "stories"}


class StoryLosses:
    """Sums for each document of a split; of a long one several rows are scored."""

    def __init__(self, rows: Rows, plan: Sequence[np.ndarray], device: torch.device) -> None:
        """plan: the rows of each batch."""
        # A document begins with bos, and no text holds one.
        begins = rows.ids[rows.starts[:-1]] == BOS
        documents = (np.cumsum(begins) - 1)[np.concatenate(plan)]
        # Brought to a GPU at once: a copy a batch would be waited for.
        self.documents = torch.split(torch.from_numpy(documents).to(device), [len(some) for some in plan])
        self.sums = torch.zeros(2, int(begins.sum()), dtype=torch.float64, device=device)  # nats, tokens

    def add(self, step: int, nats: Tensor, real: Tensor) -> None:
        """Nats and real (B, T) of a batch of the plan."""
        found = torch.stack(((nats.double() * real).sum(1), real.sum(1).double()))
        self.sums.index_add_(1, self.documents[step], found)

    def to_lists(self) -> dict[str, list[Any]]:
        """Nats to a hundredth: of a story of 200 tokens that is 0.00005 nats a token."""
        nats, tokens = self.sums.tolist()
        return {"nats": [round(one, 2) for one in nats], "tokens": [int(one) for one in tokens]}


class Tally:
    """Sums over batches that an Evaluation is made of."""

    def __init__(self, model: SomeLM, config: RunConfig, token_bytes: np.ndarray, device: torch.device) -> None:
        self.config = config
        sizes = np.zeros(config.model.vocab_size, dtype=np.int64)
        sizes[: len(token_bytes)] = token_bytes
        self.token_bytes = torch.from_numpy(sizes).to(device)
        self.nats = torch.zeros(2, dtype=torch.float64, device=device)  # on text, on padding
        self.num = torch.zeros(2, dtype=torch.int64, device=device)
        self.num_bytes = torch.zeros((), dtype=torch.int64, device=device)
        shape = (len(model.layers), config.model.num_experts)
        self.counts_real = torch.zeros(shape, dtype=torch.int64, device=device)
        self.counts_all = torch.zeros(shape, dtype=torch.int64, device=device)
        self.gate_entropy = torch.zeros(len(model.layers), dtype=torch.float64, device=device)

    def add(self, batch: Batch, nats: Tensor, routings: Sequence[Routing]) -> None:
        """Nats (B, T) of the batch's targets, and what was chosen for its tokens."""
        nats, real = nats.double(), batch.real
        self.nats += torch.stack(((nats * real).sum(), (nats * ~real).sum()))
        self.num += torch.stack((real.sum(), (~real).sum()))
        self.num_bytes += (self.token_bytes[batch.targets] * real).sum()
        if routings:
            self.add_usage(routings, real)

    def add_usage(self, routings: Sequence[Routing], real: Tensor) -> None:
        """Count what was chosen, of all layers at once; nothing waits for a GPU."""
        experts = torch.stack([routing.experts for routing in routings if routing.experts is not None])
        layer = torch.arange(len(experts), device=experts.device)[:, None, None, None]
        place = (experts + layer * self.config.model.num_experts).flatten()
        chosen = real[None, :, :, None].expand_as(experts).flatten().long()
        self.counts_real.view(-1).scatter_add_(0, place, chosen)
        self.counts_all.view(-1).scatter_add_(0, place, torch.ones_like(place))
        gates = torch.stack([routing.gates for routing in routings if routing.gates is not None])
        self.gate_entropy += (gate_entropies(gates) * real).sum((-2, -1))

    def add_up(self, group: ProcessGroup) -> None:
        """Complete the sums by what the other processes have scored."""
        group.sum_in_place([self.nats, self.num, self.num_bytes, self.counts_real, self.counts_all, self.gate_entropy])

    def result(self) -> Evaluation:
        text_nats, padding_nats = self.nats.tolist()
        num_text, num_padding = self.num.tolist()
        loss = text_nats / num_text
        share = num_text / (num_text + num_padding)
        on_padding = padding_nats / num_padding if num_padding and self.config.data.loss_on != "text" else None
        padded = None if self.config.data.loss_on == "text" else share * loss + (1 - share) * (on_padding or 0.0)
        num_bytes = int(self.num_bytes)
        return Evaluation(
            loss=loss,
            loss_on_padding=on_padding,
            loss_padded=padded,
            perplexity=math.exp(min(loss, 700.0)),
            bits_per_byte=text_nats / LN2 / num_bytes if num_bytes else math.nan,
            num_tokens=num_text,
            num_bytes=num_bytes,
            text_share=share,
            layers=tuple(self._layer(place) for place in range(len(self.counts_real))),
        )

    def _layer(self, place: int) -> dict[str, Any]:
        counted = self.counts_all if self.config.data.count_padding else self.counts_real
        figures = {"layer": place} | summarize_usage(counted[place])
        if self.config.data.count_padding:
            real = summarize_usage(self.counts_real[place])
            figures |= {"gini_real": real["gini"], "entropy_bits_real": real["entropy_bits"]}
        figures["gate_entropy_nats"] = float(self.gate_entropy[place]) / max(1, int(self.num[0]))
        return figures


def evaluation_batches(rows: Rows, config: RunConfig, *, in_order: bool = False) -> Batches:
    """Every row once: padded to seq_len where padding is scored, else as long as it must be."""
    scored = config.data.loss_on == "all_positions" or config.data.count_padding
    data = config.data.override({"batching": "padded"}) if scored or in_order else config.data
    if data.batching == "packed":
        data = data.override({"batching": "bucketed"})
    return Batches(rows, data, rows_a_step=config.data.batch_size, seed=0, keep_partial=True)


@torch.no_grad()
def evaluate(
    model: SomeLM,
    rows: Rows,
    config: RunConfig,
    token_bytes: np.ndarray,
    device: torch.device,
    *,
    group: ProcessGroup = SINGLE,
    score: Scorer | None = None,
) -> Evaluation:
    """Score every row, by the model itself or a faster way. Keys stay still; lab/adaptation.py lets them move.

    The processes of a group take turns at the batches, and all return the same figures.
    """
    score = score or model.score
    tally = Tally(model, config, token_bytes, device)
    batches = evaluation_batches(rows, config)
    stories = StoryLosses(rows, batches.plan(0, shuffle=False), device)
    for step, batch, counts in group.take_turns(batches.epoch(0, shuffle=False)):
        batch = batch.to(device)
        salt = make_salt(model.seed, step, device)
        nats, routings = score(batch.inputs, batch.targets, describe_tokens(batch, config, salt, sums=False))
        if counts:
            tally.add(batch, nats, routings)
            stories.add(step, nats, batch.real)
    tally.add_up(group)
    group.sum_in_place([stories.sums])
    return replace(tally.result(), stories=stories.to_lists())
