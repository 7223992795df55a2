"""On a GPU: generation by a captured step makes the tokens that the model makes without it."""

from typing import Any

import pytest
import torch

from some_moe.config import GravityConfig, ModelConfig
from some_moe.errors import FailureError
from some_moe.fast import accelerate
from some_moe.model.transformer import SomeLM
from some_moe.training.generation import generate_tokens

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {
    "d_model": 64, "num_layers": 3, "num_heads": 2, "vocab_size": 512, "num_experts": 16, "d_ffn": 128, "top_k": 2
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "rope": {},
    "alibi": {"positions": "alibi"},
    "sinusoidal": {"positions": "sinusoidal"},
    "hash": {"router": "hash"},
    "full": {"trainability": "full"},
    "swiglu": {"activation": "swiglu"},
    "dense": {"ffn": "dense", "dense_width": 128},
    "shared down": {"shared_down": True},
}


def make_model(**changes: Any) -> Any:
    model = ModelConfig(**SIZES | changes)
    gravity = GravityConfig() if model.ffn == "some" and model.router == "gravity" else GravityConfig.off()
    return accelerate(SomeLM(model, gravity, device="cuda"))


def tell(model: Any, rows: int, count: int, **options: Any) -> torch.Tensor:
    prompt = torch.randint(3, 512, (rows, 5), generator=torch.Generator().manual_seed(rows)).cuda()
    return torch.stack([token.cpu() for token in generate_tokens(model, prompt, count, **options)], dim=1)


@pytest.mark.parametrize("rows", [1, 3, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_tell_what_ordinary_ones_do(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from some_moe.fast import decode

    model = make_model(**KINDS[kind])
    draw = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "seeds": range(rows)}
    for options in ({}, draw):
        captured = tell(model, rows, 150, **options)
        monkeypatch.setattr(decode, "FEW_TOKENS", 10_000)
        plain = tell(model, rows, 150, **options)
        monkeypatch.undo()
        # In float32 sums round differently, and two tokens may be as likely as each other.
        same = (captured == plain).long().cumprod(1).sum(1)
        assert same.float().mean() >= 120, same


def test_a_generator_draws_the_same_captured_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from some_moe.fast import decode

    model, found = make_model(), []
    for few in (8, 10_000):
        monkeypatch.setattr(decode, "FEW_TOKENS", few)
        generator = torch.Generator("cuda").manual_seed(3)
        found.append(tell(model, 2, 20, temperature=1.0, generator=generator))
    assert torch.equal(*found)


def test_weights_that_change_between_two_texts_are_seen() -> None:
    model = make_model()
    first = tell(model, 2, 20)
    with torch.no_grad():
        model.head.bias[9] += 100.0
    assert not torch.equal(first, tell(model, 2, 20))
    assert bool((tell(model, 2, 20) == 9).all())


def test_a_model_that_gives_no_number_is_a_sentence() -> None:
    model = make_model()
    with torch.no_grad():
        model.head.bias[9] = float("nan")
    with pytest.raises(FailureError, match="gives no number"):
        tell(model, 1, 20)
