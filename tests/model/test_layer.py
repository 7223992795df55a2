"""SomeLayer alone: in somebody else's transformer, split into micro-batches, and its routing by the rules."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe import GravityConfig, ModelConfig, SomeLayer, SomeLM
from some_moe.model.routing import SUMS, Routing
from some_moe.model.tokens import TokenInfo
from tests.shared.variants import BASE, make_config, make_gravity


class ForeignTransformer(nn.Module):
    """A small transformer that knows nothing of SoME but the layer's two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True)
        self.some = SomeLayer(
            ModelConfig(d_model=32, num_heads=4, num_experts=8, d_ffn=24, top_k=2, vocab_size=40),
            GravityConfig(alpha=0.05),
        )
        self.head = nn.Linear(32, 40)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Routing]:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = x + self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]
        y, routing = self.some(x)
        return self.head(x + y), routing


def test_the_layer_works_in_somebody_elses_transformer() -> None:
    torch.manual_seed(0)
    model = ForeignTransformer()
    tokens = torch.randint(0, 40, (4, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = model.some.state.keys.clone()  # type: ignore[union-attr]
    losses = []
    for step in range(25):
        logits, routing = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.some.gravity_step(routing, step)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1
    assert not torch.equal(model.some.state.keys, start)  # type: ignore[union-attr]
    assert int(model.some.state.total.sum()) == 25 * 4 * 12 * 2  # type: ignore[union-attr]


def test_every_step_samples_other_tokens() -> None:
    layer = SomeLayer(BASE, GravityConfig(token_fraction=0.5, num_samples=4), seed=3)
    x = torch.randn(4, 16, 24)
    first, again, later = (layer(x, step=step)[1] for step in (0, 0, 1))
    assert torch.equal(first.sample, again.sample)
    assert not torch.isin(later.sample_order, first.sample_order).any()
    assert not torch.equal(first.counts, later.counts)
    told = TokenInfo.of((4, 16), x.device, seed=3, step=1)
    assert torch.equal(layer(x, told)[1].sample_order, later.sample_order)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("router", ["gravity", "learned"])
def test_in_half_precision_the_keys_and_their_history_stay_in_float32(dtype: torch.dtype, router: str) -> None:
    config = BASE.override({"center_queries": True, "router": router})
    layer = SomeLayer(config, GravityConfig(ema_decay=0.99) if router == "gravity" else None)
    assert layer.state is not None
    before = {name: value.clone() for name, value in layer.state.state_dict().items()}
    layer.to(dtype)
    for name, value in layer.state.state_dict().items():
        assert value.dtype == before[name].dtype, name
        assert torch.equal(value, before[name]), name
    assert layer.library.up.dtype == dtype
    for step in range(30):
        y, routing = layer(torch.randn(2, 8, 24, dtype=dtype), step=step)
        layer.gravity_step(routing, step)
    assert y.dtype == dtype
    assert float(layer.state.usage.sum()) == pytest.approx(config.num_experts, abs=1e-5)
    assert layer.double().state.keys.dtype == torch.float64


def test_gates_are_the_softmax_over_the_chosen_at_the_temperature() -> None:
    layer = SomeLayer(BASE.override({"temperature": 0.5}))
    x = torch.randn(2, 5, 24)
    _, routing = layer(x)
    assert layer.state is not None
    assert layer.query is not None
    scores = layer.query(x) @ layer.state.keys.T
    best = scores.topk(2)
    assert torch.equal(routing.experts, best.indices)
    assert torch.allclose(routing.gates, (best.values / 0.5).softmax(-1))


def test_output_is_the_gated_sum_of_the_chosen_experts() -> None:
    layer = SomeLayer(BASE)
    x = torch.randn(1, 3, 24)
    y, routing = layer(x)
    assert routing.experts is not None
    assert routing.gates is not None
    library = layer.library
    for place in range(3):
        expected = torch.zeros(24)
        for expert, gate in zip(routing.experts[0, place].tolist(), routing.gates[0, place], strict=True):
            hidden = F.gelu(library.up[expert] @ x[0, place] + library.up_bias[expert])
            expected = expected + gate * (library.down[expert] @ hidden + library.down_bias[expert])
        assert torch.allclose(y[0, place], expected, atol=1e-5)


def test_balance_bias_chooses_but_never_enters_the_gate() -> None:
    layer = SomeLayer(BASE)
    x = torch.randn(4, 6, 24)
    assert layer.state is not None
    assert layer.query is not None
    layer.state.bias[3] = 100.0
    _, routing = layer(x)
    assert routing.experts is not None
    assert (routing.experts == 3).any(-1).all()
    scores = layer.query(x) @ layer.state.keys.T
    assert torch.allclose(routing.gates, scores.gather(-1, routing.experts).softmax(-1), atol=1e-6)


def test_cosine_scores_ignore_the_length_of_queries_and_keys() -> None:
    layer = SomeLayer(BASE.override({"score": "cosine", "query": "linear"}))
    assert layer.key_router is not None
    query = torch.randn(7, 24)
    scores = layer.key_router.score(query)
    layer.key_router.state.keys *= 3
    assert torch.allclose(layer.key_router.score(5 * query), scores, atol=1e-5)
    assert scores.abs().max() <= 10 + 1e-5


def test_centring_subtracts_the_running_mean_for_the_scores_alone() -> None:
    layer = SomeLayer(BASE.override({"center_queries": True}))
    x = torch.randn(1, 5, 24)
    assert layer.state is not None
    assert layer.state.query_mean is not None
    assert layer.query is not None
    layer.state.query_mean.copy_(torch.randn(24))
    _, routing = layer(x)
    scores = (layer.query(x) - layer.state.query_mean) @ layer.state.keys.T
    assert torch.equal(routing.experts, scores.topk(2).indices)
    assert torch.allclose(routing.raw_sum, layer.query(x).sum((0, 1)), atol=1e-5)


def test_grounding_adds_a_share_of_the_query_before() -> None:
    layer = SomeLayer(BASE.override({"grounding": 0.1}))
    x, previous = torch.randn(1, 4, 24), torch.randn(1, 4, 24)
    assert layer.query is not None
    _, routing = layer(x, previous_query=previous)
    assert torch.allclose(routing.query, layer.query(x) + 0.1 * previous)


def test_learned_temperature_starts_where_asked_and_stays_within_bounds() -> None:
    layer = SomeLayer(BASE.override({"learn_temperature": True, "temperature": 0.8, "temperature_bounds": (0.5, 2.0)}))
    assert layer.key_router is not None
    temperature = layer.key_router.temperature
    assert temperature is not None
    assert float(temperature().detach()) == pytest.approx(0.8, rel=1e-5)
    for value in (-1e9, 1e9):
        with torch.no_grad():
            temperature.place.fill_(value)
        assert 0.5 - 1e-6 <= float(temperature().detach()) <= 2.0 + 1e-6


def test_entropy_band_pushes_only_from_outside() -> None:
    # Entropy at scores near zero is close to ln 6 = 1.79 nats.
    x = torch.randn(2, 8, 24) * 1e-3
    inside, above = (
        SomeLayer(BASE.override({"entropy_band": band, "entropy_band_weight": 1.0}))(x)[1].aux_loss
        for band in ((1.0, 2.0), (0.5, 1.0))
    )
    assert float(inside.detach()) == 0.0
    assert float(above.detach()) == pytest.approx((math.log(6) - 1.0) ** 2, rel=1e-3)


def test_balance_loss_is_one_when_even_and_counts_no_padding() -> None:
    config = BASE.override({"balance_loss": 1.0, "top_k": 6})
    x = torch.randn(2, 8, 24)
    assert float(SomeLayer(config)(x)[1].aux_loss.detach()) == pytest.approx(1.0, rel=1e-5)
    skewed = SomeLayer(BASE.override({"balance_loss": 1.0}))
    counted = torch.arange(8).expand(2, 8) < 4
    info = TokenInfo.of((2, 8), x.device, counted=counted)
    assert torch.allclose(skewed(x, info)[1].aux_loss, skewed(x[:, :4])[1].aux_loss, rtol=1e-5)


def test_weight_keys_score_by_the_mean_preactivation() -> None:
    layer = SomeLayer(BASE.override({"router": "weights"}))
    assert layer.state is not None
    direction = layer.library.up.mean(1)
    assert torch.allclose(layer.state.keys, F.normalize(direction, dim=-1), atol=1e-6)


def test_hash_routing_depends_on_the_token_id_alone() -> None:
    model = SomeLM(make_config("hash"), make_gravity("hash"))
    first, second = model(torch.tensor([[5, 7, 5]])), model(torch.tensor([[9, 5, 7]]))
    experts = first.routings[1].experts
    assert torch.equal(experts[0, 0], experts[0, 2])
    assert torch.equal(experts[0, 0], second.routings[1].experts[0, 1])
    assert torch.allclose(first.routings[1].gates, torch.tensor(0.5))
    assert not torch.equal(experts, first.routings[2].experts)


def test_gravity_terms_never_touch_learned_or_weight_keys() -> None:
    for name in ("learned-keys", "weight-keys"):
        layer = SomeLayer(make_config(name), make_gravity(name))
        assert layer.state is not None
        before = layer.state.keys.clone()
        _, routing = layer(torch.randn(2, 5, 24))
        layer.gravity_step(routing, 0)
        assert torch.equal(layer.state.keys, before)
        assert layer.state.bias.abs().sum() > 0


# --- sums add up: micro-batches and ranks give the keys of the whole batch --------------------------------

LENGTHS = torch.tensor([14, 3, 9, 1, 14, 6, 11, 8])


def train_keys(parts: list[Tensor], steps: int = 6) -> dict[str, Tensor]:
    """Run gravity for some steps on a fixed model, each step's batch given in parts (row numbers)."""
    config = BASE.override({"center_queries": True, "grounding": 0.1})
    model = SomeLM(config, make_gravity("plain"), seed=5).double()
    for step in range(steps):
        tokens = torch.randint(0, 61, (8, 14), generator=torch.Generator().manual_seed(step))
        total: list[Routing] = []
        for rows in parts:
            # As a loader would: a part is cut to its own longest row.
            longest = int(LENGTHS[rows].max())
            counted = torch.arange(longest) < LENGTHS[rows, None]
            part = tokens[rows, :longest]
            info = TokenInfo.of(part.shape, part.device, counted=counted, rows=rows, seed=5, step=step)
            output = model(part, info)
            routings = [routing.detach() for routing in output.routings]
            total = [a + b for a, b in zip(total, routings, strict=True)] if total else routings
        model.gravity_step(total, step, total_steps=steps)
    return {path: value for path, value in model.state_dict().items() if ".state." in path}


@pytest.mark.parametrize(
    "parts",
    [
        [torch.arange(0, 3), torch.arange(3, 4), torch.arange(4, 8)],
        [torch.arange(0, 8, 2), torch.arange(1, 8, 2)],
        [torch.tensor([row]) for row in (7, 2, 0, 1, 6, 3, 5, 4)],
    ],
    ids=["micro-batches", "two-ranks", "one-row-each-shuffled"],
)
def test_parts_of_a_batch_give_the_keys_of_the_whole(parts: list[Tensor]) -> None:
    whole, split = train_keys([torch.arange(8)]), train_keys(parts)
    assert int(whole["blocks.1.ffn.key_router.state.respawns"].sum()) > 0
    assert float(whole["blocks.1.ffn.key_router.state.query_mean"].abs().sum()) > 0
    for path, value in whole.items():
        if value.is_floating_point():
            assert torch.allclose(split[path], value, rtol=1e-10, atol=1e-12), path
        else:
            assert torch.equal(split[path], value), path


def test_padding_has_no_influence_on_keys() -> None:
    model = SomeLM(BASE, make_gravity("plain"))
    tokens = torch.randint(0, 61, (2, 10), generator=torch.Generator().manual_seed(0))
    counted = torch.arange(10).expand(2, 10) < 6
    padded = model(tokens, TokenInfo.of(tokens.shape, tokens.device, counted=counted)).routings
    short = model(tokens[:, :6]).routings
    for left, right in zip(padded, short, strict=True):
        assert torch.equal(left.counts, right.counts)
        assert torch.equal(left.pairs, right.pairs)
        assert torch.equal(left.sample_order, right.sample_order)
        assert torch.allclose(left.query_sum, right.query_sum, atol=1e-5)


def test_adding_routings_drops_what_belongs_to_one_batch() -> None:
    layer = SomeLayer(BASE)
    _, first = layer(torch.randn(1, 4, 24))
    _, second = layer(torch.randn(1, 6, 24))
    both = first + second
    assert both.experts is None
    assert both.query is None
    assert int(both.num_tokens) == 10
    assert not first.detach().query_sum.requires_grad


def test_a_pass_without_sums_chooses_the_same_and_cannot_move_keys() -> None:
    torch.manual_seed(0)
    model = SomeLM(BASE)
    tokens = torch.randint(0, BASE.vocab_size, (2, 9))
    whole, bare = model(tokens), model(tokens, TokenInfo.of(tokens.shape, tokens.device, sums=False))
    assert torch.equal(whole.logits, bare.logits)
    for left, right in zip(whole.routings, bare.routings, strict=True):
        assert left.experts is not None
        assert right.experts is not None
        assert torch.equal(left.experts, right.experts)
        assert {name: getattr(left, name).shape for name in SUMS} == {name: getattr(right, name).shape for name in SUMS}
    keys = [layer.state.keys.clone() for layer in model.layers if layer.state is not None]
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        model.gravity_step(bare.routings, 0)
    assert all(torch.equal(key, layer.state.keys) for key, layer in zip(keys, model.layers, strict=True) if layer.state)
