"""All layers at once move as they do one by one: under every rule, launched or compiled, and in a whole model."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from some_moe import GravityConfig, ModelConfig, SomeLM
from some_moe.fast import gravity as fast_gravity
from some_moe.hashing import make_layer_words
from some_moe.model import gravity
from some_moe.model.keystore import KeyState
from some_moe.model.routing import Routing, summarize
from some_moe.model.tokens import TokenInfo
from tests.shared.isolation import in_new_process
from tests.shared.variants import make_config, make_gravity, same, snapshot

LAYERS, STEPS, EXPERTS, TOKENS = 3, 5, 7, 24
SILENT = (2, 1)  # at this step, nothing is selected in this layer

MODEL = ModelConfig(d_model=6, num_heads=1, num_layers=LAYERS, num_experts=EXPERTS, d_ffn=4, top_k=2, vocab_size=10)
STRONG: dict[str, object] = {"alpha": 0.1, "beta": 0.05, "delta": 0.2, "theta_percentile": 0.4, "ema_decay": 0.5}
OFF: dict[str, object] = {"use_alpha": False, "use_beta": False, "use_delta": False}
BY_COUNT: dict[str, object] = {"theta": 9, "theta_percentile": None, "theta_window": 2}
PHOENIX: dict[str, object] = {"respawn_below": 0.9, "respawn_patience": 1, "respawn_max": 2}

RULES: dict[str, dict[str, object]] = {
    "published": {},
    "attraction": {"use_beta": False, "use_delta": False},
    "no-inertia": {"inertia": False, "alpha_floor": 0.02},
    "inertia-by-count": {"inertia_by": "count", "alpha_floor": 0.005, "use_beta": False, "use_delta": False},
    "peer-force": {"use_alpha": False, "use_delta": False},
    "repulsion": {"beta": -0.5, "normalize": True},
    "layer-scale": {"beta_layer_scale": (1.0, 0.5, 0.0)},
    "linear": {"beta_schedule": "linear", "beta_end": 0.2},
    "cosine-and-layer-scale": {"beta_schedule": "cosine", "beta_end": 0.2, "beta_layer_scale": (1.0, 0.5, 0.2)},
    "seek-by-count": BY_COUNT,
    "shrink": {"decay_mode": "shrink"},
    "shrink-by-count": {"decay_mode": "shrink"} | BY_COUNT,
    "fewer-samples-than-seekers": {"num_samples": 2, "respawn_max": 1, "theta_percentile": 0.9},
    "limited": {"max_step": 0.01},
    "normalized": {"normalize": True},
    "phoenix": PHOENIX,
    "phoenix-alone": OFF | PHOENIX,
    "smoothed": {"key_ema": 0.9},
    "smoothed-phoenix": {"key_ema": 0.9} | PHOENIX,
    "balanced": {"balance_rate": 0.01},
    "all": {"max_step": 0.2, "normalize": True, "balance_rate": 0.01, "key_ema": 0.5, "token_fraction": 0.7} | PHOENIX,
    "now-and-then": {"every": 2, "frozen_layers": (0,)},
    "never": {"frozen_layers": (0, 1, 2)},
    "still": OFF,
}
every_rule = pytest.mark.parametrize("name", RULES)


@pytest.fixture(autouse=True)
def _compile_afresh() -> Iterator[None]:
    """What one test compiled shall not count towards the recompilations of the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_routing(state: KeyState, config: GravityConfig, layer: int, step: int) -> Routing:
    generator = torch.Generator().manual_seed(1000 * layer + step)
    # Low numbers are drawn more often, so that some experts are under-used.
    wish = torch.rand(1, TOKENS, EXPERTS, generator=generator) + torch.linspace(1, 0, EXPERTS)
    query = torch.randn(1, TOKENS, MODEL.d_model, generator=generator, dtype=state.keys.dtype)
    counted = torch.rand(1, TOKENS, generator=generator) < (0.0 if (step, layer) == SILENT else 0.9)
    info = TokenInfo.of((1, TOKENS), torch.device("cpu"), counted=counted, step=step)
    words = make_layer_words(range(LAYERS))[layer]
    return Routing(**summarize(wish.topk(2).indices, query, state.query_mean, info, words, EXPERTS, config))


def move(
    config: GravityConfig, model: ModelConfig, dtype: torch.dtype, *, advance: fast_gravity.Advance | None
) -> list[list[dict[str, Tensor]]]:
    """The layers' buffers at the start and after each step; layer by layer, if there is no `advance`."""
    states: list[KeyState] = [KeyState(model, config, layer, seed=0).to(dtype) for layer in range(LAYERS)]
    history = [[snapshot(state) for state in states]]
    for step in range(STEPS):
        routings = [make_routing(state, config, layer, step) for layer, state in enumerate(states)]
        if advance is None:
            for state, routing in zip(states, routings, strict=True):
                gravity.step(state, routing, config, step, STEPS)
        else:
            fast_gravity.step_layers(states, routings, config, step, STEPS, advance)
        history.append([snapshot(state) for state in states])
    return history


def assert_close(
    left: list[list[dict[str, Tensor]]], right: list[list[dict[str, Tensor]]], rtol: float, atol: float
) -> None:
    for step, layer in product(range(STEPS + 1), range(LAYERS)):
        assert left[step][layer].keys() == right[step][layer].keys()
        for name, value in left[step][layer].items():
            found = right[step][layer][name]
            assert torch.allclose(value, found, rtol=rtol, atol=atol), (step, layer, name)


TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 1e-6)}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@every_rule
def test_all_layers_at_once_equal_one_by_one(name: str, dtype: torch.dtype) -> None:
    config = GravityConfig(**(STRONG | RULES[name]))
    one_by_one = move(config, MODEL, dtype, advance=None)
    assert_close(one_by_one, move(config, MODEL, dtype, advance=fast_gravity.advance_layers), *TOLERANCE[dtype])
    # The rule did act: otherwise there would be nothing to compare.
    start, *_, end = one_by_one
    for layer in range(LAYERS):
        assert same(start[layer], end[layer]) is (layer in config.frozen_layers)
    assert bool(sum(layer["respawns"].sum() for layer in end)) is config.respawns


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("change", [{"center_queries": True}, {"router": "learned"}], ids=["centred", "learned-keys"])
def test_query_means_and_learned_keys_at_once_equal_one_by_one(change: dict[str, object], dtype: torch.dtype) -> None:
    model = MODEL.override(change)
    config = GravityConfig(**STRONG) if model.router == "gravity" else GravityConfig.off(balance_rate=0.01)
    one_by_one = move(config, model, dtype, advance=None)
    at_once = move(config, model, dtype, advance=fast_gravity.advance_layers)
    assert_close(one_by_one, at_once, *TOLERANCE[dtype])
    keys_moved = not torch.equal(at_once[0][0]["keys"], at_once[-1][0]["keys"])
    assert keys_moved is (model.router == "gravity")
    assert not torch.equal(at_once[0][0]["usage"], at_once[-1][0]["usage"])


def test_a_layer_for_which_nothing_was_selected_stays_while_the_others_move() -> None:
    config = GravityConfig(**(STRONG | RULES["all"]))
    history = move(config, MODEL.override({"center_queries": True}), torch.float32, advance=fast_gravity.advance_layers)
    step, silent = SILENT
    for layer in range(LAYERS):
        assert same(history[step][layer], history[step + 1][layer]) is (layer == silent)


COMPILED_ALWAYS = ("published", "cosine-and-layer-scale", "shrink-by-count", "all", "now-and-then")


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize(
    "name", [name if name in COMPILED_ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in RULES]
)
def test_compiled_as_one_graph_equals_one_by_one(name: str) -> None:
    config = GravityConfig(**(STRONG | RULES[name]))
    compiled = torch.compile(fast_gravity.advance_layers, fullgraph=True, dynamic=False, backend="aot_eager")
    one_by_one = move(config, MODEL, torch.float64, advance=None)
    assert_close(one_by_one, move(config, MODEL, torch.float64, advance=compiled), 1e-12, 1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("name", ["published", "cosine-and-layer-scale", "all"])
def test_compiled_to_machine_code_equals_one_by_one(name: str) -> None:
    config, model = GravityConfig(**(STRONG | RULES[name])), MODEL.override({"center_queries": True})
    compiled = torch.compile(fast_gravity.advance_layers, fullgraph=True, dynamic=False)
    one_by_one = move(config, model, torch.float64, advance=None)
    assert_close(one_by_one, move(config, model, torch.float64, advance=compiled), 1e-12, 1e-12)


def count_compilations() -> dict[str, int]:
    """How often a run of each schedule compiles gravity."""
    found = {}
    for schedule in ("constant", "linear", "cosine"):
        torch._dynamo.reset()
        end = 0.0 if schedule == "constant" else 0.2
        config = GravityConfig(**STRONG, beta_schedule=schedule, beta_end=end)  # type: ignore[arg-type]
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(fast_gravity.advance_layers, fullgraph=True, dynamic=False, backend=counter)
        move(config, MODEL, torch.float32, advance=compiled)
        found[schedule] = int(counter.frame_count)
    return found


@pytest.mark.slow
def test_no_schedule_compiles_more_than_once() -> None:
    assert in_new_process(count_compilations) == {"constant": 1, "linear": 1, "cosine": 1}


@pytest.mark.parametrize("name", ["plain", "centred", "learned-keys", "weight-keys", "hash", "dense"])
def test_the_keys_of_all_layers_at_once_move_as_one_by_one(name: str) -> None:
    config, rules = make_config(name), make_gravity(name).override({"every": 2, "frozen_layers": (1,)})
    plain, stacked = SomeLM(config, rules), SomeLM(config, rules)
    start = {path: value.clone() for path, value in plain.state_dict().items()}
    tokens = torch.randint(0, config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))
    for step in range(4):
        info = TokenInfo.of(tokens.shape, tokens.device, step=step)
        routings = [routing.detach() for routing in plain(tokens, info).routings]
        plain.gravity_step(routings, step, total_steps=4)
        states = [layer.state for layer in stacked.layers]
        fast_gravity.step_layers(states, routings, rules, step, 4, fast_gravity.advance_layers)
    moved = set()
    for (path, left), right in zip(plain.state_dict().items(), stacked.state_dict().values(), strict=True):
        assert torch.allclose(left, right, rtol=1e-5, atol=1e-6), path
        moved |= set() if torch.equal(left, start[path]) else {path.split(".")[1]}
    assert moved == (set() if name in ("hash", "dense") else {"0", "2"})
