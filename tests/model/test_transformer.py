"""What holds for a model of every kind: it learns, it is causal, forward changes nothing, counts are exact."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from some_moe import GravityConfig, ModelConfig, SomeLM
from some_moe.config.parameters import count_parameters
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import token_cross_entropy
from tests.shared.variants import BASE, MODELS, make_config, make_gravity

every_kind = pytest.mark.parametrize("name", MODELS)


def make_model(name: str, **options: object) -> SomeLM:
    return SomeLM(make_config(name), make_gravity(name), **options)  # type: ignore[arg-type]


def make_tokens(rows: int = 3, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(0, BASE.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def next_token_loss(model: SomeLM, tokens: Tensor) -> Tensor:
    output = model(tokens)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return loss if output.aux_loss is None else loss + output.aux_loss


@every_kind
def test_every_trained_parameter_gets_a_finite_gradient(name: str) -> None:
    model = make_model(name)
    next_token_loss(model, make_tokens()).backward()  # type: ignore[no-untyped-call]
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert torch.isfinite(parameter.grad).all(), path
    # What starts at a point where it has no effect yet: LoRA's inward matrices behind a zero.
    silent = {path for path, p in model.named_parameters() if p.grad is not None and not p.grad.any()}
    assert all(path.endswith(("up_in", "down_in")) for path in silent), silent


@every_kind
def test_training_lowers_the_loss(name: str) -> None:
    model, tokens = make_model(name), make_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = float(next_token_loss(model, tokens).detach())
    for step in range(12):
        output = model(tokens, TokenInfo.of(tokens.shape, tokens.device, step=step, ids=tokens))
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.gravity_step([routing.detach() for routing in output.routings], step, total_steps=12)
    assert float(next_token_loss(model, tokens).detach()) < start - 0.3


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_the_loss_is_the_weighed_sum_of_cross_entropies(kind: str) -> None:
    model, tokens = make_model("plain"), make_tokens()
    inputs, targets, denominator = tokens[:, :-1], tokens[:, 1:], torch.tensor(7.0)
    numbers = torch.rand(targets.shape, generator=torch.Generator().manual_seed(0))
    weights = {"none": None, "bool": numbers < 0.5, "float": numbers}[kind]
    output = model.loss(inputs, targets, weights=weights, denominator=denominator)
    losses = token_cross_entropy(model(inputs).logits, targets)
    expected = (losses if weights is None else losses * weights).sum() / 7
    assert torch.equal(output.loss, expected)
    parameters = list(model.parameters())
    for left, right in zip(
        torch.autograd.grad(output.loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        assert torch.equal(left, right)


@every_kind
def test_forward_changes_no_state(name: str) -> None:
    model = make_model(name)
    before = {path: value.clone() for path, value in model.state_dict().items()}
    next_token_loss(model, make_tokens()).backward()  # type: ignore[no-untyped-call]
    model.eval()(make_tokens(seed=1))
    after = model.state_dict()
    assert all(torch.equal(before[path], after[path]) for path in before)


@every_kind
def test_reference_and_cpu_kernels_give_the_same_model(name: str) -> None:
    tokens = make_tokens()
    logits = [make_model(name, kernel=kernel).double()(tokens).logits for kernel in ("reference", "cpu")]
    assert torch.allclose(*logits, rtol=1e-10, atol=1e-10)


@every_kind
@pytest.mark.parametrize("way", ["computes in it", "by autocast"])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_bfloat16_trains_close_to_float32(name: str, kernel: str, way: str) -> None:
    tokens = make_tokens()
    model = make_model(name, kernel=kernel)
    exact = next_token_loss(model, tokens)
    if way == "by autocast":
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(model, tokens)
    else:
        loss = next_token_loss(model.compute_in(torch.bfloat16), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(float(loss.detach() - exact.detach())) < 0.05
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


CAUSAL = {name: SomeLM(make_config(name), make_gravity(name)).double() for name in MODELS}


@every_kind
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_changing_a_token_changes_no_logit_before_it(name: str, data: st.DataObject) -> None:
    model = CAUSAL[name]
    tokens = make_tokens(2, 8, seed=data.draw(st.integers(0, 99)))
    place = data.draw(st.integers(0, 7))
    changed = tokens.clone()
    changed[:, place] = (changed[:, place] + data.draw(st.integers(1, 60))) % 61
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.allclose(before[:, :place], after[:, :place], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, place:], after[:, place:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("positions", ["rope", "alibi", "sinusoidal"])
def test_packed_stories_do_not_see_each_other(positions: str) -> None:
    model = SomeLM(BASE.override({"positions": positions})).double()
    first, second = make_tokens(1, 4), make_tokens(1, 6, seed=1)
    packed = torch.cat((first, second), dim=1)
    info = TokenInfo.of(
        packed.shape,
        packed.device,
        segments=torch.tensor([[0] * 4 + [1] * 6]),
        positions=torch.tensor([[*range(4), *range(6)]]),
    )
    output = model(packed, info)
    assert torch.allclose(output.logits[:, :4], model(first).logits, atol=1e-12)
    assert torch.allclose(output.logits[:, 4:], model(second).logits, atol=1e-12)


@pytest.mark.parametrize("positions", ["rope", "alibi", "sinusoidal"])
def test_order_of_tokens_matters(positions: str) -> None:
    model = SomeLM(BASE.override({"positions": positions}))
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    left, right = model(tokens).logits[:, -1]
    assert not torch.allclose(left, right, atol=1e-5)


@every_kind
def test_parameter_counts_agree_between_formula_meta_device_and_model(name: str) -> None:
    config, gravity = make_config(name), make_gravity(name)
    formula = count_parameters(config)
    assert SomeLM(config, gravity, device="meta").count_parameters() == (formula.trainable, formula.total)
    assert SomeLM(config, gravity).count_parameters() == (formula.trainable, formula.total)


def test_counting_five_billion_parameters_takes_no_memory() -> None:
    model = SomeLM(ModelConfig(d_model=512, num_layers=10, num_experts=512), device="meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.count_parameters() == (29_424_640, 5_405_998_080)


def test_top_k_warmup_with_one_expert_gives_the_query_network_a_gradient() -> None:
    model = SomeLM(BASE)
    output = model(make_tokens(), top_k=1)
    F.cross_entropy(output.logits[:, :-1].flatten(0, 1), make_tokens()[:, 1:].flatten()).backward()
    for layer in model.layers:
        assert layer.query is not None
        for parameter in layer.query.parameters():
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0
    assert output.routings[0].experts.shape == (3, 9, 1)
    assert (output.routings[0].gates < 1).all()


@every_kind
def test_recomputing_activations_changes_neither_gradients_nor_keys(name: str) -> None:
    tokens, results = make_tokens(), []
    for checkpointed in (False, True):
        model = make_model(name, checkpoint_activations=checkpointed)
        output = model(tokens)
        F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        model.gravity_step([routing.detach() for routing in output.routings], 0, total_steps=10)
        gradients = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
        results.append({**gradients, **model.state_dict()})
    assert results[0].keys() == results[1].keys()
    for path, value in results[0].items():
        assert torch.equal(value, results[1][path]), path


def test_same_seed_same_model_and_another_seed_another() -> None:
    left, right, other = SomeLM(BASE, seed=3), SomeLM(BASE, seed=3), SomeLM(BASE, seed=4)
    states = [model.state_dict() for model in (left, right, other)]
    assert all(torch.equal(states[0][path], states[1][path]) for path in states[0])
    assert not torch.equal(states[0]["embedding.weight"], states[2]["embedding.weight"])
    assert not torch.equal(left.layers[0].state.keys, other.layers[0].state.keys)  # type: ignore[union-attr]
    assert not torch.equal(left.layers[0].state.keys, left.layers[1].state.keys)  # type: ignore[union-attr]


def test_controls_share_the_start_of_what_they_share() -> None:
    some = SomeLM(BASE).state_dict()
    dense = SomeLM(make_config("dense"), GravityConfig.off()).state_dict()
    shared = [path for path in some if path in dense and "ffn." not in path]
    assert len(shared) > 20
    assert all(torch.equal(some[path], dense[path]) for path in shared)


def test_gravity_that_the_model_cannot_follow_is_refused() -> None:
    with pytest.raises(ValueError, match="router: hash has no keys"):
        SomeLM(BASE.override({"router": "hash"}), GravityConfig())
