"""`some serve`: the completions API that OpenAI's clients speak, with streaming, for one run."""

import json
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from some_moe.config import ConfigError
from some_moe.live.desk import Listener, write
from some_moe.system.forms import LARGEST, Form, MisfitError, fit, is_count, is_number, is_switch, is_text
from some_moe.system.reading import clean

if TYPE_CHECKING:
    from some_moe.training.runs import Run

MOST_PROMPTS, MOST_TOKENS, MOST_STOPS = 16, 4_096, 8
NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "logprobs": None, "suffix": None}


def is_prompt(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    whole = len(texts) > 0 and (all(map(is_text, texts)) or all(map(is_count, texts)))
    return whole or (
        isinstance(value, list) and all(isinstance(one, list) and all(map(is_count, one)) for one in value)
    )


def is_stop(value: Any) -> bool:
    words = value if isinstance(value, list) else [value]
    return len(words) <= MOST_STOPS and all(is_text(word) and word for word in words)


FORM: dict[str, Form] = {
    "model?": is_text, "prompt?": is_prompt, "max_tokens?": is_count, "temperature?": is_number, "top_p?": is_number,
    "n?": is_count, "stream?": is_switch, "stop?": is_stop, "seed?": lambda seed: type(seed) is int, "echo?": is_switch,
    "best_of?": is_count, "top_k?": is_count, "repetition_penalty?": is_number, "user?": is_text,
    "stream_options?": {"include_usage?": is_switch},
}  # fmt: skip


class Completion:
    """One request, checked: what is to be written, and how it is told."""

    def __init__(self, run: "Run", model: str, body: Any) -> None:
        if not isinstance(body, dict):
            raise ConfigError("the request is no JSON object; send one with a prompt")
        for name, neutral in NEUTRAL.items():
            if body.get(name) not in (None, neutral):
                raise ConfigError(f"{name} is not supported; leave it out")
        try:
            asked = {name: value for name, value in fit(body, FORM).items() if value is not None}
        except MisfitError as error:
            raise ConfigError(f"the request {error}; see docs/live.md for what it may say") from None
        self.run, self.model, self.id, self.created = run, model, f"cmpl-{uuid.uuid4().hex}", int(time.time())
        if asked.get("model", model) not in (model, ""):
            raise UnknownModelError(f"the model {clean(asked['model'])!r} is not served here; use {model!r}")
        self.prompts = self._read_prompts(asked.get("prompt", ""))
        self.count, self.max_tokens = asked.get("n", 1), asked.get("max_tokens", 16)
        self.streams, self.echo = asked.get("stream", False), asked.get("echo", False)
        self.tells_usage = asked.get("stream_options", {}).get("include_usage", False)
        self.seed = asked.get("seed", uuid.uuid4().int) % LARGEST
        stop = asked.get("stop", [])
        self.options = {"stop": stop if isinstance(stop, list) else [stop]}
        self.options |= {"temperature": asked.get("temperature", 1.0), "top_p": asked.get("top_p", 1.0)}
        self.options |= {name: asked[name] for name in ("top_k", "repetition_penalty") if name in asked}
        self.prompt_tokens = sum(len(run.tokenizer.encode(prompt)) for prompt in self.prompts)
        self.made = 0
        for name, value, least, most in (
            ("max_tokens", self.max_tokens, 1, MOST_TOKENS), ("n", self.count, 1, MOST_PROMPTS),
            ("best_of", asked.get("best_of", self.count), self.count, self.count),
            ("prompt", len(self.prompts) * self.count, 1, MOST_PROMPTS),
            ("temperature", self.options["temperature"], 0, 10), ("top_p", self.options["top_p"], 1e-6, 1),
        ):  # fmt: skip
            if not least <= value <= most:  # type: ignore[operator]
                raise ConfigError(f"{name} {value} is out of range; use {least} to {most}")
        from some_moe.sampling import Sampling

        Sampling(**{name: value for name, value in self.options.items() if name != "stop"})  # type: ignore[arg-type]

    def _read_prompts(self, prompt: Any) -> list[str]:
        several = prompt if isinstance(prompt, list) else [prompt]
        if several and all(type(one) is int for one in several):
            several = [several]
        size = self.run.tokenizer.vocab_size
        if any(token >= size for one in several if isinstance(one, list) for token in one):
            raise ConfigError(f"the prompt has tokens beyond the vocabulary of {size:,}; send text")
        return [one if isinstance(one, str) else self.run.tokenizer.decode(one) for one in several]

    def write(self) -> Iterator[dict[str, Any]]:
        """One choice after another, in pieces: index, text and, at the end of each, the finish reason."""
        for place, prompt in enumerate(prompt for prompt in self.prompts for _ in range(self.count)):
            listener, told = Listener(self.run.tokenizer), 0
            if self.echo:
                yield self._choice(place, prompt)
            pieces = write(self.run, prompt, self.max_tokens, listener, seed=self.seed + place, **self.options)
            for piece in pieces:
                told += len(piece.text)
                yield self._choice(place, piece.text)
            self.made += listener.count
            whole = listener.count == self.max_tokens and not listener.ended and listener.length <= told
            yield self._choice(place, "", "length" if whole else "stop")

    @staticmethod
    def _choice(place: int, text: str, reason: str | None = None) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": None, "finish_reason": reason}

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.made
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.made, "total_tokens": total}

    def envelope(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        about = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return about | {"choices": choices} | more

    def whole(self, goes_on: Callable[[], bool]) -> dict[str, Any]:
        """All of it as one answer."""
        choices: dict[int, dict[str, Any]] = {}
        for piece in self.write():
            one = choices.setdefault(piece["index"], self._choice(piece["index"], ""))
            one["text"] += piece["text"]
            one["finish_reason"] = piece["finish_reason"]
            if not goes_on():
                break
        return self.envelope(list(choices.values()), usage=self.usage)

    def stream(self) -> Generator[str, None, None]:
        """The same as server-sent events."""
        for piece in self.write():
            yield f"data: {json.dumps(self.envelope([piece]))}\n\n"
        if self.tells_usage:
            yield f"data: {json.dumps(self.envelope([], usage=self.usage))}\n\n"
        yield "data: [DONE]\n\n"


class UnknownModelError(ConfigError):
    """Another model is asked for."""


def list_models(run: "Run", model: str) -> dict[str, Any]:
    about = {"id": model, "object": "model", "created": int(run.checkpoint.stat().st_mtime), "owned_by": "some-moe"}
    return {"object": "list", "data": [about]}
