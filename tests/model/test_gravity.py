"""Knowledge gravity. For each term: strength 0 is absence to the bit, and one step equals hand arithmetic.

The store of the hand-made case has three experts in two dimensions; four tokens choose two experts each.
"""

import math

import pytest
import torch
from torch import Tensor

from some_moe.config import GravityConfig, ModelConfig
from some_moe.hashing import make_layer_words
from some_moe.model import gravity
from some_moe.model.keystore import NO_WINDOW_YET, KeyState
from some_moe.model.routing import NOT_SAMPLED, Routing, summarize
from some_moe.model.tokens import TokenInfo
from tests.shared.variants import same, snapshot

MODEL = ModelConfig(d_model=2, num_heads=1, num_experts=3, d_ffn=4, top_k=2, vocab_size=10)
KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
QUERIES = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.6, 0.8], [1.6, 1.2]], dtype=torch.float64)
EXPERTS = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 1]])
LAYER_WORDS = make_layer_words(range(1))[0]
# By hand: n = (4, 3, 1); unit queries (1,0) (0,1) (.6,.8) (.8,.6); the sums s of each expert's tokens:
COUNTS = [4, 3, 1]
SUMS = [[2.4, 2.4], [1.8, 1.6], [0.6, 0.8]]
PAIRS = [[4, 3, 1], [3, 3, 0], [1, 0, 1]]
QUIET: dict[str, object] = {"use_alpha": False, "use_beta": False, "use_delta": False, "ema_decay": 0.9}
# u = 0.9·1 + 0.1·3·n/8
USAGE = [1.05, 1.0125, 0.9375]


def make_state(config: GravityConfig, model: ModelConfig = MODEL, layer: int = 0) -> KeyState:
    state = KeyState(model, config, layer, seed=0).double()
    if model is MODEL:
        state.keys.copy_(KEYS)
        if state.smoothed is not None:
            state.smoothed.copy_(KEYS)
    return state


def make_routing(config: GravityConfig, counted: Tensor | None = None, mean: Tensor | None = None) -> Routing:
    info = TokenInfo.of((1, 4), torch.device("cpu"), counted=counted)
    return Routing(**summarize(EXPERTS[None], QUERIES[None], mean, info, LAYER_WORDS, 3, config))


def take_step(state: KeyState, config: GravityConfig, step: int = 0, **options: int) -> Tensor:
    gravity.step(state, make_routing(config, mean=state.query_mean), config, step, **options)
    return state.keys


def close(found: Tensor, expected: object) -> bool:
    return torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


# --- the sums ---------------------------------------------------------------------------------------------


def test_routing_sums_equal_hand_arithmetic() -> None:
    routing = make_routing(GravityConfig())
    assert routing.counts.tolist() == COUNTS
    assert close(routing.query_sum, SUMS)
    assert routing.pairs.tolist() == PAIRS
    assert int(routing.num_tokens) == 4
    assert routing.raw_sum.shape == (0,)  # nothing is centred
    sampled = routing.sample[routing.sample_order < NOT_SAMPLED]
    assert close(sampled[sampled[:, 0].argsort()], [[0.0, 1.0], [0.6, 0.8], [0.8, 0.6], [1.0, 0.0]])
    assert (routing.sample_order[4:] == NOT_SAMPLED).all()


def test_uncounted_tokens_enter_no_sum() -> None:
    routing = make_routing(GravityConfig(), torch.tensor([[True, False, False, True]]))
    assert routing.counts.tolist() == [2, 2, 0]
    assert close(routing.query_sum, [[1.8, 0.6], [1.8, 0.6], [0, 0]])
    assert int((routing.sample_order < NOT_SAMPLED).sum()) == 2


# --- each term, by hand -----------------------------------------------------------------------------------


def test_usage_equals_hand_arithmetic() -> None:
    config = GravityConfig(**QUIET)
    state = make_state(config)
    take_step(state, config)
    assert close(state.usage, USAGE)
    assert state.total.tolist() == COUNTS
    assert torch.equal(state.keys, KEYS)


def test_attraction_equals_hand_arithmetic() -> None:
    config = GravityConfig(**(QUIET | {"use_alpha": True, "alpha": 0.1}))
    a = [0.1 / (1 + u) for u in USAGE]
    # s/n = (.6,.6) (.6,.5333…) (.6,.8)
    expected = [
        [1 + a[0] * (0.6 - 1), 0 + a[0] * (0.6 - 0)],
        [0 + a[1] * (0.6 - 0), 1 + a[1] * (1.6 / 3 - 1)],
        [-1 + a[2] * (0.6 + 1), 0 + a[2] * (0.8 - 0)],
    ]
    assert close(take_step(make_state(config), config), expected)


def test_attraction_without_inertia_equals_hand_arithmetic() -> None:
    config = GravityConfig(**(QUIET | {"use_alpha": True, "alpha": 0.1, "inertia": False}))
    expected = [[0.96, 0.06], [0.06, 1 - 0.1 * (1 - 1.6 / 3)], [-0.84, 0.08]]
    assert close(take_step(make_state(config), config), expected)


def test_attraction_floor_holds_the_heavy_experts() -> None:
    # α/(1+u) is 0.0488, 0.0497 and 0.0516: the floor of 0.05 lifts the first two.
    config = GravityConfig(**(QUIET | {"use_alpha": True, "alpha": 0.1, "alpha_floor": 0.05}))
    a = 0.1 / (1 + USAGE[2])
    expected = [[0.98, 0.03], [0.03, 1 + 0.05 * (1.6 / 3 - 1)], [-1 + a * 1.6, a * 0.8]]
    assert close(take_step(make_state(config), config), expected)


def test_inertia_by_count_is_never_lost_and_its_floor_lets_a_cold_expert_move() -> None:
    # The first expert was busy once (u is 0.1 by now): by its share it moves freely, by its count only at the floor.
    config = GravityConfig(**(QUIET | {"use_alpha": True, "alpha": 0.1, "inertia_by": "count", "alpha_floor": 0.01}))
    state = make_state(config)
    state.total.copy_(torch.tensor([10_000, 0, 6]))
    state.usage.copy_(torch.tensor([0.1, 1.0, 1.0]))
    # This step's 4, 3 and 1 selections count: α/(1+N) is 0.00001, 0.1/4 and 0.1/8.
    a = [0.01, 0.025, 0.0125]
    expected = [[1 - a[0] * 0.4, a[0] * 0.6], [a[1] * 0.6, 1 + a[1] * (1.6 / 3 - 1)], [-1 + a[2] * 1.6, a[2] * 0.8]]
    assert close(take_step(state, config), expected)


def test_inertia_by_count_without_attraction_is_nothing() -> None:
    for nothing in ({"use_alpha": False}, {"use_alpha": True, "alpha": 0.0}):
        config = GravityConfig(**(QUIET | nothing | {"inertia_by": "count"}))
        assert torch.equal(take_step(make_state(config), config), KEYS)


@pytest.mark.parametrize("beta", [0.2, -0.2])
def test_peer_force_equals_hand_arithmetic(beta: float) -> None:
    config = GravityConfig(**(QUIET | {"use_beta": True, "beta": beta, "max_step": 100.0}))
    # P = rows (0, 3/4, 1/4), (1, 0, 0), (1, 0, 0); P·K − K = (−1.25, .75), (1, −1), (2, 0)
    expected = [[1 - beta * 1.25, beta * 0.75], [beta, 1 - beta], [-1 + 2 * beta, 0]]
    assert close(take_step(make_state(config), config), expected)


def test_an_expert_without_peers_feels_no_peer_force() -> None:
    pairs = torch.tensor([[4, 0, 1], [0, 3, 0], [1, 0, 1]])
    force = gravity.peer_force(KEYS, pairs, 0.5)
    assert close(force, [[-1, 0], [0, 0], [1, 0]])


def test_shrinking_by_percentile_equals_hand_arithmetic() -> None:
    config = GravityConfig(
        **(QUIET | {"use_delta": True, "delta": 0.1, "decay_mode": "shrink", "theta_percentile": 0.4})
    )
    # The 0.4 quantile of (.9375, 1.0125, 1.05) is .9375 + .8·.075 = .9975: expert 2 alone is below.
    assert close(take_step(make_state(config), config), [[1, 0], [0, 1], [-0.9, 0]])


def test_shrinking_by_count_waits_for_a_full_window() -> None:
    config = GravityConfig(
        **QUIET
        | {
            "use_delta": True,
            "delta": 0.1,
            "decay_mode": "shrink",
            "theta": 7,
            "theta_percentile": None,
            "theta_window": 2,
        }
    )
    state = make_state(config)
    assert torch.equal(take_step(state, config), KEYS)
    assert state.window_last.tolist() == [NO_WINDOW_YET] * 3
    # After two steps the window holds 8, 6 and 2 selections: experts 1 and 2 are below 7.
    assert close(take_step(state, config, 1), [[1, 0], [0, 0.9], [-0.9, 0]])
    assert state.window_last.tolist() == [8, 6, 2]
    assert state.window.tolist() == [0, 0, 0]


def test_seeking_moves_towards_the_first_sample() -> None:
    config = GravityConfig(**(QUIET | {"use_delta": True, "delta": 0.1, "theta_percentile": 0.4}))
    routing = make_routing(config)
    q = routing.sample[0].tolist()
    keys = take_step(make_state(config), config)
    assert close(keys, [[1, 0], [0, 1], [-1 + 0.1 * (q[0] + 1), 0.1 * q[1]]])


def test_limit_equals_hand_arithmetic() -> None:
    delta = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    assert close(gravity.limit(delta, 1.0), [[0.6, 0.8], [0.3, 0.4], [0, 0]])


def test_limit_and_normalisation_act_on_the_sum() -> None:
    beta = 0.2
    config = GravityConfig(**(QUIET | {"use_beta": True, "beta": beta, "max_step": 0.1, "normalize": True}))
    moved = []
    for key, force in zip(KEYS.tolist(), [(-1.25, 0.75), (1, -1), (2, 0)], strict=True):
        size = beta * math.hypot(*force)
        scale = beta * min(1.0, 0.1 / size)
        x, y = key[0] + scale * force[0], key[1] + scale * force[1]
        moved.append([x / math.hypot(x, y), y / math.hypot(x, y)])
    assert close(take_step(make_state(config), config), moved)


def test_phoenix_equals_hand_arithmetic() -> None:
    config = GravityConfig(**(QUIET | {"respawn_below": 1.02, "respawn_patience": 2, "respawn_max": 1}))
    state = make_state(config)
    assert torch.equal(take_step(state, config, 0), KEYS)
    assert state.patience.tolist() == [0, 1, 1]
    # Second step: u = (1.095, 1.02375, .88125). Expert 1 has risen above 1.02; expert 2 is reborn.
    keys = take_step(state, config, 1)
    assert close(keys[:2], KEYS[:2].tolist())
    assert torch.equal(keys[2], make_routing(config).sample[0])
    assert state.respawns.tolist() == [0, 0, 1]
    assert state.patience.tolist() == [0, 0, 0]
    assert close(state.usage, [1.095, 1.02375, 1.0])


def test_the_least_used_are_respawned_first_and_the_others_wait() -> None:
    config = GravityConfig(**(QUIET | {"respawn_below": 2.0, "respawn_patience": 1, "respawn_max": 2}))
    state = make_state(config)
    take_step(state, config)
    assert state.respawns.tolist() == [0, 1, 1]
    assert state.patience.tolist() == [1, 0, 0]
    first, second = make_routing(config).sample[:2]
    assert torch.equal(state.keys[2], first)
    assert torch.equal(state.keys[1], second)


def test_phoenix_is_exempt_from_the_step_limit() -> None:
    config = GravityConfig(**(QUIET | {"respawn_below": 1.0, "respawn_patience": 1, "max_step": 1e-6}))
    state = make_state(config)
    take_step(state, config)
    assert (state.keys[2] - KEYS[2]).norm() > 0.1


def test_balance_bias_equals_hand_arithmetic() -> None:
    config = GravityConfig(**(QUIET | {"balance_rate": 0.01}))
    state = make_state(config)
    take_step(state, config)
    # E·η = (1.5, 1.125, .375)
    assert close(state.bias, [-0.01, -0.01, 0.01])
    fair = gravity.update_bias(torch.zeros(3), torch.tensor([5, 5, 5]), 0.01)
    assert torch.equal(fair, torch.zeros(3))


def test_smoothed_keys_equal_hand_arithmetic_and_are_what_routing_sees() -> None:
    config = GravityConfig(**(QUIET | {"use_beta": True, "beta": 0.2, "key_ema": 0.75}))
    state = make_state(config)
    keys = take_step(state, config).clone()
    assert state.smoothed is not None
    assert torch.allclose(state.smoothed, 0.75 * KEYS + 0.25 * keys, rtol=1e-12)
    assert state.routing_keys is state.smoothed


def test_query_mean_equals_hand_arithmetic() -> None:
    config = GravityConfig(**(QUIET | {"center_decay": 0.5}))
    model = MODEL.override({"center_queries": True})
    state = KeyState(model, config, 0, seed=0).double()
    take_step(state, config)
    assert state.query_mean is not None
    assert close(state.query_mean, [0.5 * 4.2 / 4, 0.5 * 5.0 / 4])


def test_terms_add_up_from_the_old_keys() -> None:
    every = {
        "ema_decay": 0.9,
        "alpha": 0.1,
        "beta": 0.2,
        "delta": 0.3,
        "decay_mode": "shrink",
        "theta_percentile": 0.4,
    }
    config = GravityConfig(**every)
    moved = take_step(make_state(config), config) - KEYS
    parts = torch.zeros_like(KEYS)
    for switch in ("use_alpha", "use_beta", "use_delta"):
        alone = GravityConfig(**(every | QUIET | {switch: True}))
        parts += take_step(make_state(alone), alone) - KEYS
    assert torch.allclose(moved, parts, rtol=1e-12, atol=1e-15)


# --- strength 0 is absence, to the bit --------------------------------------------------------------------

STRONG: dict[str, object] = {
    "alpha": 0.1,
    "beta": 0.2,
    "delta": 0.3,
    "theta_percentile": 0.5,
    "max_step": 0.1,
    "normalize": True,
    "respawn_below": 1.0,
    "respawn_patience": 2,
    "balance_rate": 0.01,
}


@pytest.mark.parametrize(
    ("zero", "absent"),
    [
        ({"alpha": 0.0}, {"use_alpha": False}),
        ({"beta": 0.0}, {"use_beta": False}),
        ({"delta": 0.0}, {"use_delta": False}),
        ({"beta_layer_scale": (0.0,)}, {"use_beta": False}),
        ({"respawn_below": 0.0}, {"respawn_below": 0.0, "respawn_patience": 999}),
        ({"balance_rate": 0.0}, {"balance_rate": 0.0}),
        ({"max_step": 1e9}, {"max_step": None}),
        ({"key_ema": 0.0}, {}),
        ({"beta_layer_scale": (1.0,)}, {}),
        ({"token_fraction": 1.0, "every": 1}, {}),
        ({"beta_schedule": "linear", "beta_end": 0.2}, {}),
    ],
)
def test_neutral_strength_is_bit_identical_to_absence(zero: dict[str, object], absent: dict[str, object]) -> None:
    results = []
    for change in (zero, absent):
        config = GravityConfig(**(STRONG | change))
        state = make_state(config)
        for step in range(5):
            take_step(state, config, step, total_steps=5)
        results.append(snapshot(state))
    assert same(*results)


def test_each_term_pure_function_at_strength_zero_moves_nothing() -> None:
    config = GravityConfig(alpha=0.0)
    routing = make_routing(config)
    ones, underused = torch.ones(3), torch.tensor([True, False, True])
    for delta in (
        gravity.attraction(KEYS, routing.query_sum, routing.counts, ones, config),
        gravity.peer_force(KEYS, routing.pairs, 0.0),
        gravity.shrink(KEYS, underused, 0.0),
        gravity.seek(KEYS, underused, 0.0, routing.sample, torch.tensor(4)),
    ):
        assert torch.equal(KEYS + delta, KEYS)


# --- schedules and scope ----------------------------------------------------------------------------------


def test_beta_anneals_in_size_and_keeps_its_sign() -> None:
    config = GravityConfig(beta=-3e-3, beta_schedule="linear", beta_end=5e-4, normalize=True)
    strengths = [gravity.beta_now(config, 0, step, 11) for step in (0, 5, 10, 99)]
    assert strengths == pytest.approx([-3e-3, -1.75e-3, -5e-4, -5e-4])
    cosine = config.override({"beta_schedule": "cosine"})
    assert gravity.beta_now(cosine, 0, 5, 11) == pytest.approx(-1.75e-3)
    assert abs(gravity.beta_now(cosine, 0, 1, 11)) > abs(gravity.beta_now(config, 0, 1, 11))


def test_a_schedule_without_its_length_is_refused() -> None:
    config = GravityConfig(beta_schedule="linear")
    with pytest.raises(ValueError, match="needs total_steps"):
        gravity.beta_now(config, 0, 0, None)


def test_layer_scale_acts_on_its_layer_alone() -> None:
    config = GravityConfig(beta=0.2, beta_layer_scale=(1.0, 0.5))
    assert gravity.beta_now(config, 0, 0, None) == 0.2
    assert gravity.beta_now(config, 1, 0, None) == 0.1


def test_frozen_layers_and_steps_between_change_nothing() -> None:
    config = GravityConfig(**(STRONG | {"every": 3, "frozen_layers": (1,)}))
    for layer, step, moves in ((0, 0, True), (0, 1, False), (0, 3, True), (1, 0, False)):
        state = make_state(config, layer=layer)
        before = snapshot(state)
        take_step(state, config, step)
        assert same(before, snapshot(state)) != moves


def test_token_fraction_counts_about_that_share_of_tokens() -> None:
    config = GravityConfig(token_fraction=0.3)
    experts, queries = torch.zeros(40, 50, 1, dtype=torch.int64), torch.randn(40, 50, 2)
    info = TokenInfo.of((40, 50), torch.device("cpu"))
    sums = summarize(experts, queries, None, info, LAYER_WORDS, 3, config)
    assert abs(int(sums["num_tokens"]) / 2000 - 0.3) < 0.04
    assert int(sums["counts"][0]) == int(sums["num_tokens"])


def test_an_all_padding_batch_moves_nothing() -> None:
    config = GravityConfig(**(STRONG | {"key_ema": 0.5}))
    model = MODEL.override({"center_queries": True})
    state = KeyState(model, config, 0, seed=0).double()
    take_step(state, config)
    before = snapshot(state)
    nothing = make_routing(config, torch.zeros(1, 4, dtype=torch.bool), state.query_mean)
    gravity.step(state, nothing, config, 1)
    assert same(before, snapshot(state))
    assert all(torch.isfinite(buffer).all() for buffer in before.values())
