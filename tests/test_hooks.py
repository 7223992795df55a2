"""Hooks read and change what passes through a model; where they change nothing, nothing changes."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from some_moe import hooks
from some_moe.config import ConfigError
from some_moe.hooks import HookPoint
from some_moe.model.attention import Cache
from some_moe.model.transformer import SomeLM
from some_moe.training.generation import generate_tokens
from tests.shared.variants import BASE, MODELS, make_config, make_gravity

TOKENS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))


def make(name: str = "plain") -> SomeLM:
    return SomeLM(make_config(name), make_gravity(name), seed=1).eval()


def snapshot(model: SomeLM) -> list[Any]:
    """All that hooks could leave behind on a module."""
    return [(dict(m.__dict__).keys(), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_reading_every_point_leaves_the_same_bits_and_nothing_behind(name: str) -> None:
    model = make(name)
    plain, before = model(TOKENS), snapshot(model)
    logits, found = hooks.run_with_cache(model, TOKENS)
    assert torch.equal(logits, plain.logits)
    assert list(found) == hooks.list_points(model)
    assert snapshot(model) == before
    assert torch.equal(model(TOKENS).logits, plain.logits)


@pytest.mark.parametrize("name", ["plain", "post-norm", "grounded", "every-study", "hash", "one-expert-a-token"])
@torch.no_grad()
def test_values_are_what_the_model_computes(name: str) -> None:
    model = make(name)
    output = model(TOKENS)
    _, found = hooks.run_with_cache(model, TOKENS)
    for layer, routing in enumerate(output.routings):
        assert torch.equal(found["expert_indices", layer], routing.experts)
        assert torch.equal(found["gates", layer], routing.gates)
    last = len(model.blocks) - 1
    assert torch.equal(model.head(found["resid_post", last]), output.logits)
    assert torch.equal(found["resid_pre", 1], found["resid_post", 0])
    if name != "post-norm":
        for layer in range(last + 1):
            assert torch.equal(found["resid_pre", layer] + found["attn_out", layer], found["resid_mid", layer])
            assert torch.equal(found["resid_mid", layer] + found["mlp_out", layer], found["resid_post", layer])
    assert found["q", 0].shape == (2, 9, 2, 12)


@pytest.mark.parametrize("name", ["plain", "post-norm", "hash", "one-expert-a-token", "dense"])
@torch.no_grad()
def test_every_point_can_be_edited_and_the_edit_is_felt(name: str) -> None:
    model = make(name)
    plain = model(TOKENS).logits

    def change(value: Tensor, _: HookPoint) -> Tensor:
        # Adding to all scores alike would change nothing.
        return 5 - value if value.dtype == torch.int64 else -2.0 * value

    for point in hooks.list_points(model):
        assert not torch.equal(hooks.run_with_hooks(model, TOKENS, [(point, change)]), plain), point
    assert torch.equal(model(TOKENS).logits, plain)


@torch.no_grad()
def test_zeroing_a_layers_output_is_the_model_without_it() -> None:
    model = make()
    zero = hooks.run_with_hooks(model, TOKENS, [("blocks.1.hook_mlp_out", lambda value, _: torch.zeros_like(value))])
    _, found = hooks.run_with_cache(model, TOKENS)
    block = model.blocks[2]
    info = model.inform(TOKENS, None)
    geometry = model.locate(TOKENS, info, None)[1]
    x, _ = block(found["resid_mid", 1], geometry, info, None, None, None)
    assert torch.equal(zero, model.head(x))


@torch.no_grad()
def test_an_edited_middle_goes_into_the_norm_and_past_it_whoever_else_looks() -> None:
    model = make()
    value = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(2))
    middle = value + 1 - 1
    expected = model.blocks[0].ffn(model.blocks[0].ffn_norm(middle))[0]
    seen: dict[str, Tensor] = {}
    keep = {"blocks.0.hook_mlp_out": lambda v, h: seen.__setitem__(h.name, v)}
    keep["blocks.0.hook_resid_post"] = keep["blocks.0.hook_mlp_out"]
    with hooks.attach(model, keep), hooks.attach(model, {"blocks.0.hook_resid_mid": lambda *_: value + 1}):
        with hooks.attach(model, {"blocks.0.hook_resid_mid": lambda v, _: v - 1}):
            model(TOKENS)
        assert torch.equal(seen["blocks.0.hook_mlp_out"], expected)
        assert torch.equal(seen["blocks.0.hook_resid_post"], middle + expected)
        model(TOKENS)
        assert not torch.equal(seen["blocks.0.hook_mlp_out"], expected)


@pytest.mark.parametrize("name", ["plain", "cosine", "one-expert-a-token", "learned-keys"])
@torch.no_grad()
def test_forbidden_experts_are_never_chosen_and_forced_ones_always(name: str) -> None:
    model = make(name)
    chosen = int(model(TOKENS).routings[1].experts.mode(-1).values.mode().values[0])
    with hooks.forbid(model, 1, [chosen]):
        output = model(TOKENS)
        assert not (output.routings[1].experts == chosen).any()
        assert int(output.routings[1].counts[chosen]) == 0
    for expert in range(6):
        with hooks.force(model, 1, [expert]):
            routing = model(TOKENS).routings[1]
            assert (routing.experts == expert).any(-1).all()
            if name != "one-expert-a-token":
                assert torch.allclose(routing.gates.sum(-1), torch.ones(2, 9))


@torch.no_grad()
def test_gates_follow_experts_that_were_put_in_place() -> None:
    model = make()

    def swap(value: Tensor, _: HookPoint) -> Tensor:
        return value.flip(-1)

    plain = model(TOKENS)
    with hooks.attach(model, {"blocks.0.mlp.hook_expert_indices": swap}):
        swapped = model(TOKENS)
    assert torch.equal(swapped.routings[0].experts, plain.routings[0].experts.flip(-1))
    assert torch.allclose(swapped.routings[0].gates, plain.routings[0].gates.flip(-1))
    assert torch.allclose(swapped.logits, plain.logits, atol=1e-5)


@torch.no_grad()
def test_generation_with_the_cache_sees_the_same_edits_as_without() -> None:
    model = make()
    with hooks.forbid(model, 0, [0, 1]), hooks.force(model, 2, [3]):
        cache = Cache(9)
        parts = [model(TOKENS[:, place : place + 1], cache=cache).logits for place in range(9)]
        assert torch.allclose(torch.cat(parts, 1), model(TOKENS).logits, atol=1e-5)
        shapes: list[tuple[int, ...]] = []
        with hooks.attach(model, {"blocks.0.mlp.hook_gates": lambda value, _: shapes.append(tuple(value.shape))}):
            list(generate_tokens(model, TOKENS[:1, :4], 3, temperature=0))
        assert shapes == [(1, 4, 2), (1, 1, 2), (1, 1, 2)]


def test_gradients_and_gravity_follow_what_was_edited() -> None:
    model = make("full").train()
    with hooks.forbid(model, 0, [2]):
        output = model(TOKENS)
        output.logits.sum().backward()
        model.gravity_step(output.routings, 0)
    grad = model.layers[0].library.up.grad
    assert grad is not None
    assert not grad[2].any()
    assert grad.any()
    assert int(model.layers[0].state.total[2]) == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("do", "sentence"),
    [
        (lambda m: hooks.run_with_cache(m, TOKENS, "blocks.0.hook_mlp"),
         "'blocks.0.hook_mlp' is no point of this model; did you mean 'blocks.0.hook_mlp_out'?"),
        (lambda m: hooks.run_with_cache(m, TOKENS, "xyz*"),
         "'xyz*' is no point of this model; hooks.list_points(model) names them"),
        (lambda m: hooks.run_with_hooks(m, TOKENS, [("hook_embed", lambda v, _: v[:1])]),
         "the edit of hook_embed returned torch.float32 (1, 9, 24); return a tensor torch.float32 (2, 9, 24), or None "
         "to leave it"),
        (lambda m: hooks.run_with_hooks(m, TOKENS, [("hook_embed", lambda *_: 0)]),
         "the edit of hook_embed returned 0; return a tensor torch.float32 (2, 9, 24), or None to leave it"),
        (lambda m: hooks.forbid(m, 0, range(5)),
         "5 experts cannot be forbidden where each token has 2; name 4 or fewer"),
        (lambda m: hooks.force(m, 0, [0, 1, 2]), "3 experts cannot be forced where each token has 2; name 2 or fewer"),
        (lambda m: hooks.force(m, 0, [6]), "experts [6] are not all there; name some of 0 to 5"),
        (lambda m: hooks.force(m, 3, [0]), "layer 3 has no keys to choose by; those that have are [0, 1, 2]"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_what_cannot_be_is_refused_in_a_sentence(do: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        do(make())


@torch.no_grad()
def test_forbids_that_together_leave_too_few_are_refused() -> None:
    model = make()
    sentence = r"blocks\.0\.mlp has fewer than 2 experts left to choose; forbid fewer"
    with (
        hooks.forbid(model, 0, [0, 1, 2]),
        hooks.forbid(model, 0, [3, 4]),
        pytest.raises(ConfigError, match=sentence),
    ):
        model(TOKENS)


def test_other_models_than_the_plain_one_are_refused() -> None:
    class Other(SomeLM):
        pass

    with (
        pytest.raises(ConfigError, match=r"this one is Other; open it anew with some_moe\.load"),
        hooks.attach(Other(BASE), {"hook_embed": lambda *_: None}),
    ):
        pass


@torch.no_grad()
def test_activations_show_themselves() -> None:
    _, found = hooks.run_with_cache(make(), TOKENS, ["hook_embed", "blocks.0.mlp.*"])
    assert "hook_embed" in repr(found)
    assert "(2, 9, 24)" in repr(found)
    assert found._repr_html_().count("<tr>") == len(found) + 1 == 8
    with pytest.raises(KeyError, match="none of the points that were kept"):
        found["mlp_out", 0]
