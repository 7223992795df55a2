"""What no step of gravity may ever do, on random stores, batches and rule books."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from some_moe.config import GravityConfig, ModelConfig
from some_moe.hashing import make_layer_words
from some_moe.model import gravity
from some_moe.model.keystore import KeyState
from some_moe.model.routing import Routing, summarize
from some_moe.model.tokens import TokenInfo
from tests.shared.variants import same, snapshot


@st.composite
def cases(draw: st.DrawFn) -> tuple[KeyState, Routing, GravityConfig]:
    """A random store, a random batch routed to it, and a random rule book."""
    experts, d = draw(st.integers(2, 12)), draw(st.integers(1, 6))
    k = draw(st.integers(1, experts))
    tokens = draw(st.integers(1, 20))
    normalize = draw(st.booleans())
    by_count = draw(st.booleans())
    limited = draw(st.booleans())
    config = GravityConfig(
        alpha=draw(st.sampled_from([0.0, 0.01, 1.0])),
        beta=draw(st.sampled_from([0.0, 0.005, 1.0, -0.5] if normalize or limited else [0.0, 0.005, 1.0])),
        delta=draw(st.sampled_from([0.0, 0.001, 1.0])),
        decay_mode=draw(st.sampled_from(["seek"] if normalize else ["seek", "shrink"])),
        theta=draw(st.integers(0, 30)) if by_count else None,
        theta_percentile=None if by_count else draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        theta_window=draw(st.integers(1, 2)),
        max_step=draw(st.sampled_from([1e-3, 0.1])) if limited else None,
        normalize=normalize,
        respawn_below=draw(st.sampled_from([0.0, 0.5, 5.0])),
        respawn_patience=draw(st.integers(1, 2)),
        balance_rate=draw(st.sampled_from([0.0, 0.1])),
        key_ema=draw(st.sampled_from([0.0, 0.9])),
        token_fraction=draw(st.sampled_from([0.3, 1.0])),
    )
    model = ModelConfig(
        d_model=2 * d, num_heads=1, num_experts=experts, d_ffn=2, top_k=k, vocab_size=9, positions="alibi"
    )
    state = KeyState(model, config, 0, draw(st.integers(0, 99)))
    torch.manual_seed(draw(st.integers(0, 10**6)))
    scale = draw(st.sampled_from([0.0, 1e-20, 1.0, 1e20]))
    queries = scale * torch.randn(1, tokens, 2 * d)
    chosen = torch.rand(1, tokens, experts).topk(k).indices
    info = TokenInfo.of((1, tokens), torch.device("cpu"), counted=torch.rand(1, tokens) < 0.9)
    return (
        state,
        Routing(**summarize(chosen, queries, None, info, make_layer_words(range(1))[0], experts, config)),
        config,
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_invariants_hold_on_random_inputs(case: tuple[KeyState, Routing, GravityConfig]) -> None:
    state, routing, config = case
    for step in range(3):
        before = snapshot(state)
        gravity.step(state, routing, config, step)
        after = snapshot(state)
        for buffer in after.values():
            assert torch.isfinite(buffer.double()).all()
        assert after["keys"].shape == before["keys"].shape
        if config.normalize:
            assert torch.allclose(after["keys"].norm(dim=-1), torch.ones(len(after["keys"])), atol=1e-5)
        reborn = after["respawns"] - before["respawns"]
        assert ((reborn == 0) | (reborn == 1)).all()
        assert int(reborn.sum()) <= config.respawn_max
        assert reborn.any() <= config.respawns
        moved = (after["keys"] - before["keys"]).norm(dim=-1)
        if config.max_step is not None and not config.normalize:
            assert (moved[reborn == 0] <= config.max_step * (1 + 1e-4) + 1e-6).all()
        if int(routing.counts.sum()) == 0:
            assert same(before, after)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_decay_leaves_used_keys_still(case: tuple[KeyState, Routing, GravityConfig]) -> None:
    state, routing, config = case
    only_decay = config.override({"alpha": 0.0, "beta": 0.0, "respawn_below": 0.0, "normalize": False})
    for step in range(3):
        before = state.keys.clone()
        gravity.step(state, routing, only_decay, step)
        underused = gravity.find_underused(state.usage, state.window_last, only_decay)
        assert torch.equal(state.keys[~underused], before[~underused])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-6, 0.1, 3.0]))
def test_no_step_is_longer_than_max_step(seed: int, max_step: float) -> None:
    torch.manual_seed(seed)
    delta = torch.randn(7, 5) * 10.0 ** torch.randint(-6, 6, (7, 1))
    limited = gravity.limit(delta, max_step)
    assert (limited.norm(dim=-1) <= max_step * (1 + 1e-5)).all()
    short = delta.norm(dim=-1) <= max_step
    assert torch.equal(limited[short], delta[short])
