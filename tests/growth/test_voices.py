"""What branches add to the logits: a head of their own, mixed with the base's by their share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import some_moe
from some_moe.config import ConfigError, GravityConfig, ModelConfig
from some_moe.growth.library import Voices, widen
from some_moe.growth.opening import let_learn, set_favour
from some_moe.model.routing import Routing
from some_moe.model.transformer import SomeLM
from some_moe.system.records import Branch
from tests.shared.tiny import A1, TINY
from tests.shared.typed import refused

SIZES, RANKS = (2, 3, 1), (4, 0, 2)


def make_model(*ranks: int, looks_back: float = 0.0) -> SomeLM:
    """A base of six experts, and branches whose heads were drawn."""
    config = ModelConfig(
        d_model=16, num_heads=2, num_experts=6, num_layers=2, d_ffn=8, top_k=2, vocab_size=50, score="cosine"
    )
    how: dict[str, Any] = {"trainability": "full", "looks_back": looks_back}
    branches = [
        Branch(name=str(number), experts=size, head_rank=rank, **how)
        for number, (size, rank) in enumerate(zip(SIZES, ranks, strict=False))
    ]
    model = widen(SomeLM(config, GravityConfig.off()), branches)
    for number, (name, value) in enumerate(model.named_parameters()):
        if ".head_" in name:
            value.data.normal_(generator=torch.Generator().manual_seed(number))
    return model


def voices_of(model: SomeLM) -> Voices:
    assert isinstance(model.voices, Voices)
    return model.voices


def route(experts: list[int], gates: list[float]) -> Routing:
    """One token's experts and gates."""
    shapes = (torch.tensor(experts)[None, None], torch.tensor(gates)[None, None])
    sums = dict.fromkeys(
        ("counts", "query_sum", "pairs", "num_tokens", "raw_sum", "sample", "sample_order"), torch.empty(0)
    )
    return Routing(**sums, experts=shapes[0], gates=shapes[1])


def speak(model: SomeLM, x: Tensor, routing: Routing) -> Tensor:
    """The logits of one token (D,)."""
    with torch.no_grad():
        logits = model.head(x[None, None])
        return (logits + voices_of(model)(x[None, None], logits, routing))[0, 0]


def heads(model: SomeLM) -> list[Tensor]:
    """Each branch's update (V, D); of one that has none, zero."""
    return [
        torch.zeros(50, 16) if not rank else (part.get_parameter("head_out") @ part.get_parameter("head_in")).detach()
        for part, rank in zip(model.layers[-1].library.get_submodule("branches").children(), RANKS, strict=True)
    ]


def test_probabilities_are_mixed_by_the_share_of_the_gates() -> None:
    model, x = make_model(*RANKS), torch.randn(16, generator=torch.Generator().manual_seed(0))
    first, _, last = heads(model)
    base = model.head(x).detach()
    found = speak(model, x, route([7, 3], [0.3, 0.7])).softmax(-1)
    assert torch.allclose(found, 0.7 * base.softmax(-1) + 0.3 * (base + first @ x).softmax(-1), atol=1e-6)
    found = speak(model, x, route([6, 7], [0.4, 0.6])).softmax(-1)
    assert torch.allclose(found, (base + first @ x).softmax(-1), atol=1e-6)
    found = speak(model, x, route([6, 11], [0.25, 0.5])).softmax(-1)  # two branches: one head of both updates
    both = (base + first @ x / 3 + last @ x * 2 / 3).softmax(-1)
    assert torch.allclose(found, 0.25 * base.softmax(-1) + 0.75 * both, atol=1e-6)


@pytest.mark.parametrize("experts", [[0, 5], [8, 10], [9, 2]])
def test_tokens_of_the_base_and_of_branches_without_a_head_keep_their_logits(experts: list[int]) -> None:
    model, x = make_model(*RANKS), torch.randn(16, generator=torch.Generator().manual_seed(0))
    logits = speak(model, x, route(experts, [0.5, 0.5]))
    with torch.no_grad():
        assert torch.equal(logits, model.head(x[None, None])[0, 0])


def test_a_head_of_rank_0_is_none() -> None:
    model = make_model(0, 0, 0)
    assert model.voices is None
    assert not [name for name, _ in model.named_parameters() if ".head_" in name]


def test_only_the_last_layer_has_heads() -> None:
    names = {name.rpartition(".ffn.")[0] for name, _ in make_model(*RANKS).named_parameters() if ".head_" in name}
    assert names == {"blocks.1"}


def test_a_head_learns_from_the_tokens_that_its_branch_serves() -> None:
    for favour, learns in ((1e9, True), (-1e9, False)):
        model = let_learn(make_model(*RANKS))
        set_favour(model, favour)
        tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
        model.loss(tokens, tokens.roll(-1, 1), denominator=torch.tensor(16.0)).loss.backward()
        grads = {name: value.grad for name, value in model.named_parameters() if ".head_" in name}
        assert len(grads) == 4
        for grad in grads.values():
            assert grad is not None
            assert bool(grad.isfinite().all())
        assert any(bool(grad.any()) for grad in grads.values() if grad is not None) == learns


def test_a_branch_that_looks_back_learns_at_full_share() -> None:
    model = let_learn(make_model(4, looks_back=0.7))
    tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    model.loss(tokens, tokens.roll(-1, 1), denominator=torch.tensor(16.0)).loss.backward()
    for name, value in model.named_parameters():
        if ".head_" in name or name.endswith(".down_bias"):
            assert value.grad is not None
            assert bool(value.grad.isfinite().all())
            assert bool(value.grad.any())


def test_bad_ranks_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("grow", str(tmp_path), "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    for value in ("-1", "4097"):
        assert f"--head-rank {value} is out of range; use 0 (none) to 4,096" in refused(
            capsys, *words, "--head-rank", value
        )
    with pytest.raises(ConfigError, match="--head-rank -1 is out of range"):
        some_moe.grow(tmp_path, tmp_path, tmp_path / "out", head_rank=-1)


@pytest.mark.parametrize(("name", "value"), [("fast", "on"), ("fsdp", "true"), ("expert-parallel", "all")])
def test_what_a_branch_cannot_be_grown_with_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    some_moe.train(A1.config.override(TINY), out=tmp_path / "base", display=False)
    words = ("grow", str(tmp_path / "base"), "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    said = refused(capsys, *words, f"--train.{name}", value)
    assert f"train.{name.replace('-', '_')} {value.title() if value == 'true' else value} is not to be had" in said
    assert not (tmp_path / "out").exists()
