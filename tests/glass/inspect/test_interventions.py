"""Interventions: experts are taken away, exchanged or found by random keys, and the model is left as it was."""

from itertools import combinations

import numpy as np
import pytest
import torch

from some_moe.config import RunConfig
from some_moe.glass.inspect.interventions import (
    Probe,
    exchange_experts,
    fit_bias,
    knock_out,
    replay,
    route_by_chance,
    stand_in,
)
from some_moe.glass.inspect.trials import draw_matched_sets, measure_harm
from some_moe.model.transformer import SomeLM
from tests.shared.variants import make_config, make_gravity, same, snapshot

WITH_KEYS = ["plain", "cosine", "centred", "one-expert-a-token", "learned-keys", "weight-keys", "learned-temperature"]
LIBRARIES = ["plain", "lora", "full", "gains", "shared-down", "hash", "bfloat16-experts"]


def make_case(variant: str) -> tuple[SomeLM, RunConfig, Probe]:
    config = RunConfig(name="case", model=make_config(variant), gravity=make_gravity(variant))
    model = SomeLM(config.model, config.gravity, seed=3).eval()
    random = np.random.default_rng(0)
    tokens = random.integers(3, config.model.vocab_size, 90)
    story = np.repeat([0, 1, 4], [40, 20, 30])
    return model, config, Probe(tokens, np.roll(tokens, -1), story)


def all_tensors(model: SomeLM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("variant", WITH_KEYS)
def test_nobody_chooses_a_knocked_out_expert_and_other_layers_are_left_alone(variant: str) -> None:
    model, config, probe = make_case(variant)
    before, base = all_tensors(model), replay(model, probe, config)
    gone = np.bincount(base.experts[1].ravel()).argmax()
    with stand_in(knock_out(model.layers[1], [int(gone)])):
        found = replay(model, probe, config)
    assert (found.experts[1] != gone).all()
    assert (found.experts[0] == base.experts[0]).all()
    untouched = (base.experts[1] != gone).all(-1)
    first_change = [np.flatnonzero(~untouched & (probe.story == s)).min(initial=90) for s in range(3)]
    earlier = np.arange(90) < np.array(first_change)[probe.story]
    assert found.nats[earlier] == pytest.approx(base.nats[earlier], abs=1e-5)
    assert not np.allclose(found.nats, base.nats, atol=1e-6)
    assert same(before, all_tensors(model))


def test_tokens_fall_to_their_next_best_expert() -> None:
    model, config, probe = make_case("one-expert-a-token")
    layer = model.layers[0]
    base = replay(model, probe, config)
    gone = int(base.experts[0, 0, 0])
    with torch.no_grad():
        normed = model.blocks[0].ffn_norm
        seen: list[torch.Tensor] = []
        handle = normed.register_forward_hook(lambda *call: seen.append(call[2]))
        model(probe.batch.inputs)
        handle.remove()
        scores = layer.key_router.score(layer.query(seen[0]))[probe.batch.real] + layer.state.bias
    scores[:, gone] = -torch.inf
    with stand_in(knock_out(layer, [gone])):
        found = replay(model, probe, config)
    assert (found.experts[0, :, 0] == scores.argmax(-1).numpy()).all()


def test_experts_that_give_nothing_leave_the_residual_stream_as_it_was() -> None:
    model, config, probe = make_case("plain")
    library, last = model.layers[-1].library, model.blocks[-1]
    tensors = [*library.named_parameters(recurse=False), *library.named_buffers(recurse=False)]
    stream: list[torch.Tensor] = []
    handles = [last.ffn_norm.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0]))]
    handles.append(last.register_forward_hook(lambda *call: stream.append(call[2][0])))
    with stand_in(*((library, name, torch.zeros_like(tensor)) for name, tensor in tensors)):
        replay(model, probe, config)
        y, _ = model.layers[-1](torch.randn(2, 3, config.model.d_model))
    for handle in handles:
        handle.remove()
    assert not y.any()
    before, after = stream
    assert before.any()
    assert torch.equal(before, after)


def test_no_more_experts_are_knocked_out_than_a_token_can_spare() -> None:
    model, _, _ = make_case("plain")
    with pytest.raises(ValueError, match="1 experts would be left"):
        knock_out(model.layers[0], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("variant", LIBRARIES)
def test_exchanged_experts_work_under_each_others_keys(variant: str) -> None:
    model, config, probe = make_case(variant)
    before, base = all_tensors(model), replay(model, probe, config)
    layer = model.layers[0]
    order = np.roll(np.arange(config.model.num_experts), 1)
    x = torch.randn(5, config.model.d_model)
    gates = torch.ones(5, 1)
    with torch.no_grad():
        expected = layer.library(x, torch.full((5, 1), 2), gates)
        with stand_in(*exchange_experts(layer, order)):
            assert torch.equal(layer.library(x, torch.full((5, 1), 3), gates), expected)
            found = replay(model, probe, config)
    assert (found.experts[0] == base.experts[0]).all()
    assert not np.allclose(found.nats, base.nats, atol=1e-6)
    assert same(before, all_tensors(model))


def test_exchanging_nothing_changes_nothing() -> None:
    model, config, probe = make_case("plain")
    base = replay(model, probe, config)
    with stand_in(*exchange_experts(model.layers[0], np.arange(config.model.num_experts))):
        assert (replay(model, probe, config).nats == base.nats).all()


def test_a_failure_puts_everything_back() -> None:
    model, _, _ = make_case("plain")
    before = snapshot(model.layers[0].state)
    with pytest.raises(RuntimeError, match="stop"), stand_in(knock_out(model.layers[0], [1])):
        raise RuntimeError("stop")
    assert same(before, snapshot(model.layers[0].state))


@pytest.mark.parametrize("variant", WITH_KEYS)
def test_random_keys_route_anew_with_about_the_wanted_loads(variant: str) -> None:
    model, config, probe = make_case(variant)
    before, base = all_tensors(model), replay(model, probe, config)
    wanted, chance = torch.tensor([0.3, 0.1, 0.2, 0.15, 0.15, 0.1]), torch.Generator().manual_seed(5)
    for layer, queries in zip(model.layers, base.queries, strict=True):
        one, other = route_by_chance(layer, queries, wanted, 2, chance)
        load = np.bincount(one.ravel(), minlength=6) / one.size
        assert np.sort(load) == pytest.approx(wanted.sort().values.numpy(), abs=0.06)
        assert (np.sort(one) != np.sort(other)).any()
    assert same(before, all_tensors(model))


@pytest.mark.parametrize("variant", WITH_KEYS)
def test_a_replay_gives_the_queries_as_they_meet_the_keys(variant: str) -> None:
    model, config, probe = make_case(variant)
    base = replay(model, probe, config)
    for layer, queries, experts in zip(model.layers, base.queries, base.experts, strict=True):
        scores = layer.key_router.score(queries) + layer.state.bias
        assert (scores.topk(experts.shape[-1]).indices.numpy() == experts).all()
    assert base.gates.shape == base.experts.shape


def test_a_fitted_bias_gives_the_wanted_loads_and_keeps_unused_experts_unused() -> None:
    torch.manual_seed(0)
    scores = torch.randn(800, 8) + torch.linspace(0, 4, 8)
    wanted = torch.tensor([0.0, 0.05, 0.05, 0.1, 0.2, 0.2, 0.2, 0.2])
    chosen = (scores + fit_bias(scores[None], wanted, 2)[0]).topk(2).indices
    load = torch.bincount(chosen.flatten(), minlength=8) / chosen.numel()
    assert load.sort().values.tolist() == pytest.approx(wanted.tolist(), abs=0.01)
    assert load[0] == 0  # the expert that was least used without a bias


def test_a_probe_keeps_the_order_of_its_tokens() -> None:
    tokens, story = np.arange(5, 11), np.array([3, 3, 3, 8, 8, 9])
    probe = Probe(tokens, tokens + 1, story)
    assert probe.batch.inputs.tolist() == [[5, 6, 7], [8, 9, 0], [10, 0, 0]]
    assert probe.batch.targets[probe.batch.real].tolist() == [6, 7, 8, 9, 10, 11]
    assert probe.story.tolist() == [0, 0, 0, 1, 1, 2]


def test_matched_sets_are_of_other_experts_and_displace_the_class_as_much() -> None:
    usage = np.array([50, 30, 20, 30, 0, 25, 25, 50])
    served = np.array([20, 10, 10, 10, 0, 5, 5, 20])
    sets = draw_matched_sets(usage, served, [0], 6, 2, np.random.default_rng(0))
    assert len({frozenset(gone) for gone in sets}) == len(sets)
    for gone in sets:
        assert 0 not in gone
        assert 4 not in gone
        assert abs(served[gone].sum() - 20) <= 5
    miss = [abs(usage[gone].sum() - 50) for gone in sets]
    assert miss == sorted(miss)
    assert draw_matched_sets(np.array([5, 5, 0]), np.array([5, 5, 0]), [0, 1], 2, 1, np.random.default_rng(0)) == []


def test_matched_sets_are_fewer_where_the_others_make_no_more() -> None:
    random = np.random.default_rng(0)
    assert len(draw_matched_sets(np.full(12, 10), np.full(12, 2), [0, 1], 10, 2, random)) == 10
    few = draw_matched_sets(np.array([90, 5, 5, 5, 5]), np.array([9, 1, 1, 1, 1]), [0], 10, 1, random)
    assert {frozenset(gone) for gone in few} == {frozenset(two) for two in combinations(range(1, 5), 2)}


def test_harm_is_counted_beyond_what_displacement_costs() -> None:
    # Ten tokens of the class lose 8 gates and 5 nats; with other experts a gate costs them 0.1. Others: 2 gates, 0.5.
    found = measure_harm(np.array([5, 8, 1, 10, 10]), np.array([2, 2, 3, 6, 20]))
    assert found == pytest.approx((5 - 0.8) / 10 - (2 - 1) / 20)
    # Who only loses more gates is not hurt beyond that.
    assert measure_harm(np.array([8, 80, 2, 20, 100]), np.array([1, 10, 5, 50, 100])) == pytest.approx(0)
