"""Copies of the weights in bf16 give what autocast gives, compile once, and leave the gradients where they belong."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from some_moe import SomeLM
from some_moe.config import ModelConfig
from some_moe.experts import Linear
from some_moe.model.copies import weights_copied
from some_moe.model.embedding import Embedding
from tests.shared.variants import BASE

Gradients = dict[str, Tensor | None]


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.config.error_on_recompile = False


def draw_tokens(config: ModelConfig, rows: int = 3, time: int = 12, device: str = "cpu") -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, config.vocab_size, (2, rows, time), generator=source).to(device)
    return tokens, targets


def make_model(config: ModelConfig, backend: str | None, *, device: str = "cpu", whole: bool = False) -> SomeLM:
    model = SomeLM(config, checkpoint_activations=config.norm == "post", device=device)
    if backend is not None:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=whole, dynamic=False)
        model.score_targets = torch.compile(model.score_targets, backend=backend, dynamic=False)  # type: ignore[method-assign]
    return model


def find_gradients(
    model: SomeLM, copies: torch.dtype | None, tokens: Tensor, targets: Tensor
) -> tuple[Tensor, Gradients]:
    """Loss and gradients in bf16 by autocast, with copies of the weights in another type or none."""
    model.zero_grad()
    with weights_copied(model, copies or torch.bfloat16, enabled=copies is not None):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            # As in training: on a GPU by the kernel that makes the loss and its gradient.
            output = model(tokens, targets=targets, denominator=torch.ones((), device=tokens.device))
        assert output.loss is not None
        loss = output.loss + (0 if output.aux_loss is None else output.aux_loss)
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "post-norm": {"norm": "post", "positions": "alibi", "shared_expert": 10},  # its activations are made twice
    "full": {"trainability": "full", "balance_loss": 0.01},
    "lora": {"trainability": "lora", "lora_rank": 3},
    "shared-down": {"shared_down": True},
    "dense": {"ffn": "dense", "dense_width": 48},
    "sinusoidal": {"positions": "sinusoidal"},
    "dropout": {"dropout": 0.2},
}


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_copies_in_bf16_have_the_bits_of_autocast(changes: dict[str, object], backend: str | None) -> None:
    config = BASE.override(changes)
    batch = draw_tokens(config)
    model = make_model(config, backend)
    # Copies in float32 change nothing but the width of attention's product: autocast casts them.
    (expected_loss, expected), (loss, found) = (
        find_gradients(model, dtype, *batch) for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(loss, expected_loss)
    for name, gradient in expected.items():
        assert gradient is not None
        assert gradient.norm() > 0 or name.endswith("_in"), name  # LoRA starts at zero, behind these
        assert gradient.dtype == torch.float32
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_model_with_copies_learns_as_one_without(changes: dict[str, object]) -> None:
    model = make_model(BASE.override(changes), None)
    batch = draw_tokens(BASE)
    (expected_loss, expected), (loss, found) = (
        find_gradients(model, dtype, *batch) for dtype in (None, torch.bfloat16)
    )
    assert torch.equal(loss, expected_loss)
    scale = sum(float(gradient.norm()) for gradient in expected.values() if gradient is not None) / len(expected)
    for name, gradient in expected.items():
        assert gradient is not None
        assert (found[name] - gradient).norm() < 2e-2 * gradient.norm() + 1e-3 * scale, name


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_steps_with_copies_compile_once_and_evaluation_reads_the_parameters() -> None:
    model, batch = make_model(BASE, "aot_eager"), draw_tokens(BASE)
    nats = []
    for step in range(3):
        # All that is compiled is compiled in the first step, and by the first evaluation.
        torch._dynamo.config.error_on_recompile = step > 0
        find_gradients(model, torch.bfloat16, *batch)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            nats.append(float(model(batch[0], targets=batch[1]).nats.sum()))
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad / parameter.grad.norm()
    assert nats[0] > nats[1] > nats[2]


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    model, (tokens, targets) = make_model(BASE, None), draw_tokens(BASE)
    alone = [find_gradients(model, torch.bfloat16, tokens[[row]], targets[[row]])[1] for row in (0, 1)]
    model.zero_grad()
    with weights_copied(model, torch.bfloat16):
        for row in (0, 1):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(tokens[[row]], targets=targets[[row]])
            output.nats.sum().backward()
    for name, parameter in model.named_parameters():
        first, second = (gradients[name] for gradients in alone)
        assert first is not None
        assert second is not None
        assert torch.equal(parameter.grad, first + second), name


def test_a_map_that_was_not_used_has_no_gradient() -> None:
    maps = nn.ModuleList((Linear(8, 4), Linear(8, 4)))
    with weights_copied(maps, torch.bfloat16):
        maps[0](torch.randn(3, 8, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.grad is not None for parameter in maps[0].parameters())
    assert all(parameter.grad is None for parameter in maps[1].parameters())


def test_gradients_of_biases_are_not_rounded() -> None:
    layer = Linear(8, 4)
    back = torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    with weights_copied(layer, torch.bfloat16):
        layer(torch.randn(5, 7, 8, dtype=torch.bfloat16)).backward(back)
    assert layer.bias.grad is not None
    assert torch.allclose(layer.bias.grad.double(), back.double().sum((0, 1)), rtol=1e-6)
    assert not torch.equal(layer.bias.grad, layer.bias.grad.bfloat16().float())


def test_embedded_rows_are_those_of_the_copy_unless_something_comes_before_the_rounding() -> None:
    tokens, _ = draw_tokens(BASE)
    for changes, may_round in (({}, True), ({"positions": "sinusoidal"}, False), ({"dropout": 0.1}, False)):
        model = make_model(BASE.override(changes), None)
        with weights_copied(model, torch.bfloat16):
            x = model.embedding(tokens)
        assert torch.equal(x, model.embedding(tokens).to(x.dtype))
        assert (x.dtype == torch.bfloat16) is may_round


def test_copies_go_away_when_a_step_fails() -> None:
    layer = Linear(8, 4)
    with pytest.raises(RuntimeError, match="shapes"), weights_copied(layer, torch.bfloat16):
        layer(torch.ones(3, 9, dtype=torch.bfloat16))
    assert layer.copies is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_on_a_gpu_no_cast_of_a_weight_is_left_and_the_numbers_are_the_same() -> None:
    config = ModelConfig(d_model=64, num_layers=3, num_heads=2, vocab_size=512, num_experts=16, d_ffn=128, top_k=2)
    config = config.override({"expert_dtype": "bfloat16"})
    model = make_model(config, "inductor", device="cuda", whole=True)
    batch = draw_tokens(config, 8, 128, "cuda")
    num_casts = []
    results = []
    for dtype in (None, torch.bfloat16):
        find_gradients(model, dtype, *batch)  # compiles
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            results.append(find_gradients(model, dtype, *batch))
            torch.cuda.synchronize()
        names = [event.name for event in profile.events()]
        num_casts.append(sum(re.fullmatch(r"triton_poi_fused__to_copy(_cat)?_\d+", name) is not None for name in names))
    assert num_casts[0] >= 8 * config.num_layers
    assert num_casts[1] == 0
    (expected_loss, expected), (loss, found) = results
    assert torch.equal(loss, expected_loss)
    for name, gradient in expected.items():
        assert gradient is not None
        if name.endswith("bias"):
            assert (found[name] - gradient).norm() <= 5e-3 * gradient.norm(), name
        elif name == "embedding.weight":  # in float32 both, but not added up in the same order
            assert (found[name] - gradient).norm() <= 5e-6 * gradient.norm(), name
        else:
            assert torch.equal(found[name], gradient), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_tokens", [1000, 3072, 3073, 20_000])
def test_on_a_gpu_the_gradient_of_an_embedding_is_not_rounded(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    embedding = Embedding(300, 64, may_round=True).cuda()
    tokens = (300 * torch.rand(num_tokens, device="cuda") ** 4).long()[None]  # a few of them very often
    back = torch.randn(1, num_tokens, 64, device="cuda").bfloat16()
    embedding.copy = embedding.weight.detach().bfloat16()
    (found,) = torch.autograd.grad(embedding(tokens), embedding.weight, back)
    exact = torch.zeros(300, 64, dtype=torch.float64, device="cuda").index_add(0, tokens[0], back[0].double())
    assert found.dtype == torch.float32
    assert (found.double() - exact).norm() <= 5e-6 * exact.norm()
