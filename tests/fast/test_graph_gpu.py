"""On a GPU: captured steps equal eager ones, wait for nothing, and the plain model compiles as one graph."""

import itertools
import math
import threading
from typing import Any

import pytest
import torch

from some_moe.config import DataConfig, GravityConfig, ModelConfig, RunConfig, TrainConfig
from some_moe.data.batches import Batch
from some_moe.fast.static_inputs import StaticInputs, list_tensors
from some_moe.model.library import ExpertLibrary
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.training import step as step_module
from some_moe.training.machine import choose_machine, settle_experts
from some_moe.training.step import prepare

pytestmark = pytest.mark.gpu


def make_config(compile_model: bool | None, kernel: str = "auto") -> RunConfig:
    return settle_experts(
        RunConfig(
            model=ModelConfig(
                d_model=64, num_layers=3, num_heads=2, vocab_size=512, num_experts=16, d_ffn=128, top_k=2
            ),
            gravity=GravityConfig(),
            data=DataConfig(seq_len=128, batch_size=8, batching="padded"),
            train=TrainConfig(device="cuda", compile=compile_model, kernel=kernel, learning_rate=1e-3),
        )
    )


def make_batch(seed: int) -> Batch:
    tokens = torch.randint(3, 512, (8, 129), generator=torch.Generator().manual_seed(seed))
    return Batch(
        inputs=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        real=torch.ones(8, 128, dtype=torch.bool),
        rows=torch.arange(8),
    ).pin()


def make_stepper(config: RunConfig) -> Any:
    machine = choose_machine(config.train)
    return machine.make_stepper(machine.make_model(config), config, 1000)


@pytest.mark.filterwarnings("ignore")
def test_captured_steps_learn_as_ordinary_ones_do() -> None:
    losses = []
    for compile_model in (False, True, None):
        stepper = make_stepper(make_config(compile_model))
        losses.append([float(stepper(make_batch(step % 4), step).loss) for step in range(12)])
        assert bool(stepper.captures) is (compile_model is not False)
        assert stepper.compiled is bool(compile_model)
    for found in losses[1:]:
        assert torch.allclose(torch.tensor(losses[0]), torch.tensor(found), atol=2e-2)
        assert found[-1] < found[0]


@pytest.mark.filterwarnings("ignore")
def test_a_captured_step_follows_the_rate_and_moves_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are numbers that a capture could have kept as they were when it was made."""
    ends = {}
    for rate_now in (True, False):
        stepper = make_stepper(make_config(True))
        if not rate_now:
            monkeypatch.setattr(step_module, "rate_at", lambda *_: 0.0)
        before = {}
        for step in range(8):
            stepper(make_batch(step % 4), step)
            if step == 4:  # the capture is made
                assert stepper.captures
                before = {name: tensor.clone() for name, tensor in stepper.model.state_dict().items()}
        ends[rate_now] = before, stepper.model.state_dict()
    for rate_now, (before, after) in ends.items():
        assert all(not torch.equal(before[name], after[name]) for name in before if name.endswith("state.keys"))
        assert torch.equal(before["head.weight"], after["head.weight"]) is not rate_now


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kernel", "precision"), [("reference", "bf16"), ("cpu", "fp32")])
def test_experts_that_are_a_loop_train_compiled_without_a_capture(kernel: str, precision: str) -> None:
    changes = {"train.precision": precision, "model.trainability": "full", "model.expert_dtype": "float32"}
    stepper = make_stepper(make_config(True, kernel).override(changes))
    losses = [float(stepper(make_batch(step % 4), step).loss) for step in range(6)]
    assert not stepper.captures
    assert losses[4] < losses[0]


@pytest.mark.filterwarnings("ignore")
def test_a_step_is_captured_while_another_thread_pins_batches() -> None:
    stepper, over, refused = make_stepper(make_config(True)), threading.Event(), []

    def pin_on() -> None:
        for number in itertools.count(1):
            if over.is_set():
                return
            try:
                torch.empty(4096 * number % 2**24 + 1).pin_memory()  # other sizes: memory that is not at hand yet
            except RuntimeError as error:
                refused.append(error)

    thread = threading.Thread(target=pin_on)
    thread.start()
    try:
        losses = [float(stepper(make_batch(step % 4), step).loss) for step in range(8)]
    finally:
        over.set()
        thread.join()
    assert stepper.captures
    assert not refused
    assert all(map(math.isfinite, losses))


@pytest.mark.filterwarnings("ignore")
def test_steps_wait_for_nothing() -> None:
    stepper = make_stepper(make_config(True))
    batches = [make_batch(step) for step in range(4)]
    for step in range(6):
        stepper(batches[step % 4], step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(6, 12):
            stepper(batches[step % 4], step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore")
def test_inputs_arrive_in_time_and_are_not_overtaken_by_later_ones() -> None:
    config = make_config(True)
    sent = [prepare(make_batch(step), config, step, 20, torch.device("cpu")) for step in range(20)]
    static = StaticInputs(sent[0], torch.device("cuda"))
    arrived = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs in sent:
            torch.cuda._sleep(5_000_000)  # the step before is at work for a few milliseconds
            static.fill(inputs)
            arrived.append([tensor.clone() for tensor in list_tensors(static.inputs)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for inputs, found in zip(sent, arrived, strict=True):
        for expected, tensor in zip(list_tensors(inputs), found, strict=True):
            assert torch.equal(tensor.cpu(), expected)


@pytest.mark.filterwarnings("ignore")
def test_the_whole_plain_model_is_one_graph() -> None:
    config = make_config(False)
    model = SomeLM(config.model, config.gravity, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = make_batch(0).inputs.cuda()
    info = TokenInfo.of(tokens.shape, tokens.device, ids=tokens)
    output, plain = compiled(tokens, info), model(tokens, info)
    assert torch.allclose(output.logits, plain.logits, atol=5e-2)
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(output.logits.float().square().sum(), list(wanted.values()))
    expected = torch.autograd.grad(plain.logits.float().square().sum(), list(wanted.values()))
    for name, left, right in zip(wanted, found, expected, strict=True):
        assert right.norm() > 0, name
        assert (left - right).norm() < 5e-2 * right.norm(), name


def test_without_the_fast_model_a_gpu_trains_the_plain_one() -> None:
    losses = []
    for fast in ("off", "auto"):
        stepper = make_stepper(make_config(False).override({"train.fast": fast}))
        assert (type(stepper.model) is SomeLM) is (fast == "off")
        losses.append([float(stepper(make_batch(step % 4), step).loss) for step in range(8)])
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=2e-2)


@pytest.mark.parametrize(
    ("kernel", "width", "fits"),
    [("auto", 16, True), ("auto", 18, False), ("grouped", 16, True), ("reference", 16, False), ("cpu", 16, False)],
)
def test_paths_that_loop_over_experts_are_known_not_to_fit_a_graph(kernel: str, width: int, fits: bool) -> None:
    from some_moe.fast.experts import fits_graph

    config = ModelConfig(d_model=16, num_heads=2, num_experts=4, d_ffn=width, top_k=2, expert_dtype="bfloat16")
    assert fits_graph(ExpertLibrary(config, 0, kernel=kernel, device="cuda"), torch.bfloat16) is fits


@pytest.mark.filterwarnings("ignore")
def test_captured_scores_are_those_of_the_model_as_it_is_now() -> None:
    stepper = make_stepper(make_config(None))
    scored = []
    for step in range(9):
        batch = make_batch(step).to(torch.device("cuda"))
        info = TokenInfo.of(batch.inputs.shape, batch.inputs.device, step=step, sums=False)
        with torch.no_grad():
            nats, routings = stepper.model.score(batch.inputs, batch.targets, info)
        found, chosen = stepper.score(batch.inputs, batch.targets, info)
        torch.testing.assert_close(found, nats, rtol=0.0, atol=0.0)
        for left, right in zip(chosen, routings, strict=True):
            assert torch.equal(left.experts, right.experts)
            assert torch.equal(left.gates, right.gates)
        scored.append(float(found.mean()))
        stepper(make_batch(0), step)  # weights and keys move on
    assert stepper.score.captures
    assert len(set(scored)) == len(scored)
