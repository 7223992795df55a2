"""The path of every token of a text through the layers: which experts ran for it, and with what weight.

Shapes: L traced layers, T positions (bos and the text), K experts a token, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from some_moe.config import ConfigError
from some_moe.data.tokenizer import BOS, SPECIAL_TOKENS, Tokenizer
from some_moe.glass.inspect.collection import Collection
from some_moe.layout import Style
from some_moe.system.reading import clean

if TYPE_CHECKING:  # torch is needed to run a model, and not to show what one did
    from some_moe.glass.notebook import Framed
    from some_moe.training.runs import Run

PRINTED_TOKENS = 20


@dataclass(frozen=True, kw_only=True)
class TracedToken:
    """One position: what stood there, who worked on it, and how well the next token was foreseen."""

    text: str
    experts: tuple[tuple[int, ...], ...]  # for each traced layer, strongest gate first
    gates: tuple[tuple[float, ...], ...]
    next_probability: float | None  # what the model gave to the token that follows; None where none does
    next_nats: float | None  # minus its logarithm: the loss at this position
    guess: str | None  # the likeliest next token; None where only what happened was recorded
    guess_probability: float | None


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace:
    """A text as one model saw it."""

    run: str  # name of the run
    step: int  # of the checkpoint
    layers: tuple[int, ...]  # the traced SoME layers, in order of depth
    num_experts: int
    top_k: int
    router: str
    tokens: tuple[TracedToken, ...]

    @property
    def loss(self) -> float | None:
        """Mean nats over the tokens that follow another; None where no token does."""
        nats = [token.next_nats for token in self.tokens if token.next_nats is not None]
        return sum(nats) / len(nats) if nats else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self) | {"loss": self.loss}

    def __repr__(self) -> str:
        """The first tokens, each with its experts."""
        from some_moe.glass.page.terminal import format_blocks, make_trace_table

        table = make_trace_table(self, PRINTED_TOKENS)
        return "\n".join([f"{clean(self.run)}, step {self.step:,}", *format_blocks([table], width=100, style=Style())])

    def _repr_html_(self) -> str:
        """The text in the colours of its experts, for a notebook; it needs no script."""
        from some_moe.glass.notebook import draw_trace

        return draw_trace(self)

    def page(self, height: int = 640) -> "Framed":
        """The page that `some trace` writes, in a frame: layer by layer, expert by expert."""
        from some_moe.glass.notebook import Framed
        from some_moe.glass.page.render import render_trace

        return Framed(render_trace(self), height)


def trace(run: "Run", text: str, layers: Sequence[int] | None = None) -> Trace:
    """Let a loaded run read `text` once, and record its experts in these SoME layers (default: all).

    The keys stay still. A text that is empty or longer than the run's rows is refused.
    """
    import torch

    ids, chosen, config = encode_text(run, text), choose_layers(run, layers), run.config
    with torch.no_grad():
        output = run.model(torch.tensor([ids], device=run.model.head.weight.device))
    log_share = output.logits[0].double().log_softmax(-1)  # (T, V)
    # The model may have more ids than the tokenizer knows; a guess must be one that can be shown.
    guesses = log_share[:, : run.tokenizer.vocab_size].max(-1)
    nats = [-float(log_share[place, target]) for place, target in enumerate(ids[1:])]
    names = name_tokens(guesses.indices.tolist(), run.tokenizer)
    return _make_trace(
        {"run": config.name, "step": run.step, "router": config.model.router, "num_experts": config.model.num_experts},
        chosen,
        name_tokens(ids, run.tokenizer),
        np.stack([output.routings[layer].experts[0].cpu().numpy() for layer in chosen]),
        np.stack([output.routings[layer].gates[0].float().cpu().numpy() for layer in chosen]),
        [*nats, None],
        [(name, math.exp(float(value))) for name, value in zip(names, guesses.values, strict=True)],
    )


def trace_collected(collection: Collection, tokenizer: Tokenizer, *, story: int = 0, num_tokens: int = 120) -> Trace:
    """The first tokens of a story that was analysed before: the same record, without running the model again.

    What the model would have guessed was not kept, so the guesses are None.
    """
    places, meta = np.flatnonzero(collection.story == story)[:num_tokens], collection.meta
    if (collection.tokens[places] >= tokenizer.vocab_size).any():
        raise ConfigError(f"what was collected of {meta['run']!r} has tokens that its tokenizer lacks; analyse it anew")
    return _make_trace(
        {name: meta[name] for name in ("run", "step", "router", "num_experts")},
        tuple(meta["depths"]),
        name_tokens(collection.tokens[places].tolist(), tokenizer),
        collection.experts[:, places],
        collection.gates[:, places],
        collection.loss[places].astype(float).tolist(),
        [(None, None)] * len(places),
    )


def _make_trace(
    about: dict[str, Any],
    layers: tuple[int, ...],
    names: Sequence[str],
    experts: np.ndarray,
    gates: np.ndarray,
    nats: Sequence[float | None],
    guesses: Sequence[tuple[str | None, float | None]],
) -> Trace:
    """A trace of T tokens with these names, experts and gates (L, T, K), losses and guesses."""
    experts, gates = sort_by_gate(experts, gates)
    tokens = tuple(
        TracedToken(
            text=name,
            experts=tuple(map(tuple, experts[:, place].tolist())),
            gates=tuple(tuple(round(gate, 4) for gate in layer) for layer in gates[:, place].tolist()),
            next_probability=None if loss is None else math.exp(-loss),
            next_nats=loss,
            guess=guess,
            guess_probability=share,
        )
        for place, (name, loss, (guess, share)) in enumerate(zip(names, nats, guesses, strict=True))
    )
    return Trace(**about, layers=layers, top_k=experts.shape[-1], tokens=tokens)


def encode_text(run: "Run", text: str) -> list[int]:
    """bos and the ids of the text; one that is empty, broken or too long is refused."""
    if not text.strip():
        raise ConfigError(f"the text {text!r} is empty; give at least one word to trace")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"the text {text!r} is not valid UTF-8; give it in UTF-8") from None
    ids = [BOS, *run.tokenizer.encode(text)]
    seq_len = run.config.data.seq_len
    if len(ids) > seq_len:
        raise ConfigError(
            f"the text has {len(ids) - 1} tokens, but this run read at most {seq_len - 1} (data.seq_len {seq_len}); "
            "give a shorter text"
        )
    return ids


def choose_layers(run: "Run", layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers asked for, in order of depth; all of them by default."""
    model = run.config.model
    if model.ffn != "some":
        raise ConfigError(
            f"{str(run.path)!r} has no experts to trace (model.ffn is {model.ffn}); trace a run with model.ffn some"
        )
    if layers is None:
        return tuple(range(model.num_layers))
    for layer in layers:
        if not 0 <= layer < model.num_layers:
            raise ConfigError(f"layer {layer} is not in {str(run.path)!r}; its layers are 0 to {model.num_layers - 1}")
    if not layers:
        raise ConfigError("no layer is given; name at least one, such as 0")
    return tuple(sorted(set(layers)))


def sort_by_gate(experts: np.ndarray, gates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put the strongest expert of each token first: experts and gates (L, T, K) → the same, sorted."""
    order = np.argsort(-gates, axis=-1, kind="stable")
    return np.take_along_axis(experts, order, -1), np.take_along_axis(gates, order, -1)


def name_tokens(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """How each id is shown: its text, or the name of a special token. Half a character is shown as �."""
    return [SPECIAL_TOKENS[i] if i < len(SPECIAL_TOKENS) else tokenizer.decode([i]) for i in ids]
