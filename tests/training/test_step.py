"""One training step: parts add up to the whole, and each switch does what it says."""

import numpy as np
import pytest
import torch

from some_moe.config import DataConfig, GravityConfig, ModelConfig, RunConfig, TrainConfig
from some_moe.data.batches import Batches, Rows
from some_moe.data.tokenizer import BOS, EOS
from some_moe.fast.static_inputs import ALIGNMENT, StaticInputs, list_tensors
from some_moe.model.transformer import SomeLM, token_cross_entropy
from some_moe.training.optim import make_optimizer
from some_moe.training.step import prepare, train_step

MODEL = ModelConfig(
    d_model=16, num_layers=2, num_heads=2, vocab_size=20, num_experts=4, d_ffn=8, top_k=2, center_queries=True
)
GRAVITY = GravityConfig(
    alpha=0.1,
    delta=0.1,
    theta_percentile=0.3,
    respawn_below=0.97,
    respawn_patience=1,
    token_fraction=0.5,
    ema_decay=0.5,
)
CPU = torch.device("cpu")


def make_rows(count: int) -> Rows:
    random = np.random.default_rng(0)
    lengths = random.integers(2, 33, count)
    stories = [np.array([BOS, *random.integers(3, 20, n - 1), EOS], dtype=np.uint16) for n in lengths]
    return Rows(np.concatenate(stories), np.cumsum([0, *map(len, stories)]))


def run_steps(batch_size: int, batching: str, **data: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Five steps of 32 rows in float64, computed batch_size rows at a time."""
    config = RunConfig(
        model=MODEL,
        gravity=GRAVITY,
        data=DataConfig(seq_len=40, batch_size=batch_size, batching=batching, **data),  # type: ignore[arg-type]
        train=TrainConfig(learning_rate=3e-3),
    )
    batches = Batches(make_rows(400), config.data, rows_a_step=32, seed=1)
    model = SomeLM(MODEL, GRAVITY).double()
    optimizer = make_optimizer(model, config.train)
    losses = []
    for step, batch in enumerate(batches.epoch(0)):
        if step == 5:
            break
        losses.append(float(train_step(model, optimizer, prepare(batch, config, step, 5, CPU), config).loss))
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("batching", "data"),
    [
        ("padded", {}),
        ("bucketed", {}),
        ("packed", {}),
        ("padded", {"loss_on": "all_positions", "count_padding": True}),
    ],
)
def test_accumulating_four_by_eight_equals_one_by_thirty_two(batching: str, data: dict[str, object]) -> None:
    whole_losses, whole = run_steps(32, batching, **data)
    split_losses, split = run_steps(8, batching, **data)
    assert len(whole_losses) == 5
    assert split_losses == pytest.approx(whole_losses, abs=1e-9)
    for path, value in whole.items():
        assert torch.allclose(split[path].double(), value.double(), rtol=0, atol=1e-9), path
    assert all(int(whole[f"blocks.{layer}.ffn.key_router.state.respawns"].sum()) > 0 for layer in range(2))


@pytest.mark.parametrize("loss_on", ["text", "all_positions"])
def test_the_loss_is_the_mean_over_text_or_over_all_positions(loss_on: str) -> None:
    data = DataConfig(seq_len=40, batch_size=8, batching="padded", loss_on=loss_on)  # type: ignore[arg-type]
    config = RunConfig(model=MODEL, gravity=GRAVITY, data=data, train=TrainConfig())
    batch = next(iter(Batches(make_rows(32), data, rows_a_step=32, seed=1).epoch(0)))
    model = SomeLM(MODEL, GRAVITY)
    with torch.no_grad():
        nats = token_cross_entropy(model(batch.inputs).logits, batch.targets)
    assert not batch.real.all()
    expected = float(nats[batch.real].mean() if loss_on == "text" else nats.mean())
    inputs = prepare(batch, config, 0, 10, CPU)
    result = train_step(model, make_optimizer(model, config.train), inputs, config)
    assert float(result.loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"trainability": "full"}, {"gains": True}])
def test_decay_acts_on_matrices_alone_or_on_everything(changes: dict[str, object]) -> None:
    model = SomeLM(MODEL.override(changes))
    names = {p: name for name, p in model.named_parameters()}
    for decay_on, undecayed in (("matrices", True), ("all", False)):
        config = TrainConfig(decay_on=decay_on, weight_decay=0.3)  # type: ignore[arg-type]
        groups = make_optimizer(model, config).param_groups
        assert any(group["weight_decay"] == 0 for group in groups) is undecayed
        decayed = next(group for group in groups if group["weight_decay"] == 0.3)
        assert all(names[p].endswith(("weight", "up", "down")) for p in decayed["params"]) is undecayed
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("clip", [0.0, 1e-6])
def test_clipping_bounds_the_gradient_and_zero_leaves_it(clip: float) -> None:
    config = RunConfig(model=MODEL, gravity=GRAVITY, data=DataConfig(seq_len=40), train=TrainConfig(clip=clip))
    batch = next(iter(Batches(make_rows(32), config.data, rows_a_step=32, seed=1).epoch(0)))
    model = SomeLM(MODEL, GRAVITY)
    inputs = prepare(batch, config, 0, 10, CPU)
    result = train_step(model, make_optimizer(model, config.train), inputs, config)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    expected = float(result.gradient_norm) if clip == 0 else clip
    assert float(norm) == pytest.approx(expected, rel=1e-2)
    assert float(result.gradient_norm) > 1e-3


def test_a_capture_is_given_all_that_differs_between_steps() -> None:
    config = RunConfig(
        model=MODEL,
        data=DataConfig(seq_len=33, batch_size=16, batching="padded"),
        train=TrainConfig(seed=7, global_batch_tokens=32 * 33),
    )
    batches = list(Batches(make_rows(64), config.data, seed=0, rows_a_step=32).epoch(0))
    own, new = (prepare(batch, config, step, 10, CPU) for step, batch in enumerate(batches[:2]))
    assert len(own.shares) == 2
    assert own.shares != new.shares
    static = StaticInputs(own, CPU)
    for inputs in (own, new):
        static.fill(inputs)
        for mine, theirs in zip(static.inputs.parts, inputs.parts, strict=True):
            for name, value in vars(theirs).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(getattr(mine, name), value), name
        assert static.inputs.shares == inputs.shares
        assert torch.equal(static.inputs.denominator, inputs.denominator)
        assert torch.equal(static.inputs.salt, inputs.salt)
        assert torch.equal(static.inputs.rate, inputs.rate)
    places = [tensor.data_ptr() - static.memory.data_ptr() for tensor in list_tensors(static.inputs)]
    assert all(place % ALIGNMENT == 0 for place in places)
