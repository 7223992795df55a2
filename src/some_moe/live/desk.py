"""The desk: the one place where models are opened and asked. One question at a time; torch is loaded by the first.

Shapes: E experts.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from some_moe.config import ConfigError
from some_moe.data.tokenizer import EOS
from some_moe.errors import in_a_sentence
from some_moe.live.keys import Insight
from some_moe.live.watched import Watched
from some_moe.system.reading import clean

if TYPE_CHECKING:
    from some_moe.data.tokenizer import Tokenizer
    from some_moe.glass.inspect.interventions import StandIn
    from some_moe.training.runs import Run

MOST_MODELS = 2  # what is compared with each other
LOOK_TOKENS = 4_000
PATIENCE_SECONDS = 1.5  # a text that is being stopped is over by then
CHOSEN_ANYWAY = 1e9  # a bias beyond all scores
Pair = Sequence[int]  # layer, expert


class BusyError(Exception):
    """Somebody else is being answered."""


class Desk:
    """Models by (run, checkpoint), the last used ones; device: where they compute."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.models: OrderedDict[tuple[str, str], Run] = OrderedDict()
        self.insights: dict[str, Insight] = {}
        self.busy, self.waiting = threading.Lock(), 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Answer one question; whoever comes meanwhile waits a moment, and is then told to come again."""
        self.take(PATIENCE_SECONDS)
        try:
            yield
        finally:
            self.busy.release()

    def take(self, patience: float = 0.0) -> None:
        if not self.busy.acquire(timeout=patience):
            raise BusyError

    def open(self, run: Watched, checkpoint: str = "best") -> "Run":
        """A run with the model of a checkpoint: best, last or step-N."""
        from some_moe.training.runs import load

        found = load(run.path, checkpoint=checkpoint, device=self.device)
        key = (run.key, str(found.checkpoint))
        if key not in self.models:
            while len(self.models) >= MOST_MODELS:
                self.models.popitem(last=False)
            found.model  # noqa: B018 - what is wrong with it is said now
            self.models[key] = found
        self.models.move_to_end(key)
        return self.models[key]

    # --- traces -----------------------------------------------------------------------------------------------

    @in_a_sentence()
    def trace(
        self, run: Watched, text: str, checkpoint: str, forbid: list[Pair], force: list[Pair], favour: float | None
    ) -> dict[str, Any]:
        """Every token's path; and another, where experts are forbidden or forced, or branches favoured otherwise."""
        from some_moe.glass.inspect.interventions import stand_in
        from some_moe.glass.inspect.traces import encode_text, trace

        opened = self.open(run, checkpoint)
        own = trace(opened, text).to_dict()
        text_bytes = len(opened.tokenizer.decode(encode_text(opened, text)[1:]).encode())
        found: dict[str, Any] = {"trace": own, "altered": None, "bits_per_byte": None}
        nats = [token["next_nats"] for token in own["tokens"] if token["next_nats"] is not None]
        if nats and text_bytes:
            found["bits_per_byte"] = sum(nats) / math.log(2) / text_bytes
        changes = self._alter(run, opened, forbid, force, favour)
        if changes:
            with stand_in(*changes):
                found["altered"] = trace(opened, text).to_dict()
        return dict(clean(found))

    def _alter(
        self, run: Watched, opened: "Run", forbid: list[Pair], force: list[Pair], favour: float | None
    ) -> "list[StandIn]":
        """What stands in for the selection biases of the layers concerned, and for what says who serves a text."""
        import torch

        from some_moe.growth.opening import move_favour

        layers, model = opened.model.layers, opened.config.model
        if not forbid and not force and favour is None:
            return []
        if any(layer.state is None for layer in layers):
            raise ConfigError(f"{run.shown} chooses experts by hash, without keys: none can be forbidden or forced")
        if any(at >= len(layers) for at, _ in (*forbid, *force)):
            raise ConfigError(f"{run.shown} has the layers 0 to {len(layers) - 1}; name one of them")
        changes: list[StandIn] = []
        if favour is not None and run.grown is not None:
            changes = move_favour(opened.model, favour - run.grown.favour)
        biases = {owner: value for owner, name, value in changes if name == "bias"}
        for number, layer in enumerate(layers):
            state = layer.state
            assert state is not None
            bias, count = biases.get(state, state.bias).clone(), len(state.bias)
            barred, forced = ({e for at, e in pairs if at == number} for pairs in (forbid, force))
            if not barred | forced <= set(range(count)):
                raise ConfigError(f"layer {number} has the experts 0 to {count - 1}; name some of them")
            if barred & forced:
                raise ConfigError(f"expert {min(barred & forced)}, layer {number}, is forbidden and forced; choose one")
            if len(forced) >= model.top_k:  # all others are barred, so that the nearest of them are chosen
                barred |= set(range(count)) - forced
            elif forced:
                bias[list(forced)] = CHOSEN_ANYWAY
            if count - len(barred) < model.top_k:
                raise ConfigError(f"too few experts of layer {number} are left; a token needs {model.top_k}")
            bias[list(barred)] = -torch.inf
            changes.append((state, "bias", bias))
        return changes

    # --- experts at work --------------------------------------------------------------------------------------

    @in_a_sentence()
    def look(self, run: Watched) -> Insight:
        """Replay a run's best checkpoint on its own text, to see what every expert does."""
        from some_moe.glass.inspect.collect import collect

        opened = self.open(run)
        rows = opened.read_data().valid
        self.insights[run.key] = Insight(run, collect(opened, rows, split="valid", max_tokens=LOOK_TOKENS))
        return self.insights[run.key]


class Written:
    """A piece of text; and of every token that was made for it, the experts a layer."""

    def __init__(self, text: str, experts: list[list[list[int]]]) -> None:
        self.text, self.experts = text, experts


class Listener:
    """Stands in for a tokenizer, and notes which tokens come."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self.tokenizer, self.count, self.last = tokenizer, 0, -1
        self.length = 0  # characters of all that came, whole ones

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        self.count, self.last = self.count + 1, ids[-1]
        text = self.tokenizer.decode(ids)
        self.length += 0 if text.endswith("\ufffd") else len(text)
        return text

    @property
    def ended(self) -> bool:
        """Whether the model itself came to an end."""
        return self.last == EOS


def write(
    run: "Run", prompt: str, max_tokens: int, listener: Listener | None = None, **options: Any
) -> Iterator[Written]:
    """`Run.generate`, with the experts that each token went through."""
    from some_moe.training.generation import stream_text

    ways: list[list[list[int]]] = []

    def note(_: Any, __: Any, output: Any) -> None:
        chosen = (routing.experts[0, -1] for routing in output.routings if routing.experts is not None)
        ways.append([experts.tolist() for experts in chosen])

    handle = run.model.register_forward_hook(note)
    try:
        tokenizer: Any = listener or run.tokenizer
        with in_a_sentence():
            for piece in stream_text(run.model, tokenizer, prompt, max_tokens, **options):
                yield Written(piece, ways.copy())
                ways.clear()
    finally:
        handle.remove()
