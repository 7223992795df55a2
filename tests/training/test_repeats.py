"""The same run twice gives the same bits, for every kind of model, at any number of threads that stays the same."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from some_moe.cli import main
from some_moe.experts import ExpertWeights, LoraWeights, mix_cpu
from tests.golden.kinds import KINDS

# Large enough that torch shares out every operation (from 32,768 numbers on), and with more than two experts a token:
# two numbers have the same sum in either order.
SHARED_OUT = [
    *("train", "--preset", "smoke", "--model.query", "mlp", "--model.d-model", "96", "--model.num-experts", "12"),
    *("--model.top-k", "4", "--model.num-layers", "2", "--data.batch-size", "24", "--data.train-subset-size", "48"),
    *("--data.val-subset-size", "4", "--train.epochs", "1", "--train.max-steps", "2", "--train.log-every", "1"),
    *("--train.sample-tokens", "0", "--train.compile", "false"),
]


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def make_weights(kind: str) -> ExpertWeights:
    """12 experts of width 32 for tokens of width 96; `kind` says what of them is trained."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    stacks = {"up": draw(12, 32, 96), "up_bias": draw(12, 32), "down": draw(12, 96, 32), "down_bias": draw(12, 96)}
    if kind == "full":
        stacks = {name: stack.requires_grad_() for name, stack in stacks.items()}
    gain = draw(12, 32).requires_grad_() if kind == "gains" else None
    shapes = {"up_in": (12, 4, 96), "up_out": (12, 32, 4), "down_in": (12, 4, 32), "down_out": (12, 96, 4)}
    trained = {name: draw(*shape).requires_grad_() for name, shape in shapes.items()}
    lora = LoraWeights(**trained) if kind == "lora" else None
    return ExpertWeights(**stacks, gain=gain, lora=lora)


@pytest.mark.parametrize("kind", ["frozen", "full", "gains", "lora"])
def test_experts_and_their_gradients_repeat_to_the_bit(kind: str, threads: int) -> None:
    weights = make_weights(kind)
    x = torch.randn(2048, 96, generator=torch.Generator().manual_seed(2)).requires_grad_()
    gates = torch.rand(2048, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
    experts = torch.rand(2048, 12, generator=torch.Generator().manual_seed(4)).topk(4).indices
    stacks = [*vars(weights).values(), *(vars(weights.lora).values() if weights.lora else ())]
    trained = [x, gates, *(stack for stack in stacks if isinstance(stack, torch.Tensor) and stack.requires_grad)]
    first = None
    for _ in range(12):
        y = mix_cpu(x, experts, gates, weights)
        found = [y.detach(), *torch.autograd.grad(y.square().sum(), trained)]
        first = first or found
        assert all(torch.equal(left, right) for left, right in zip(first, found, strict=True)), f"{threads} threads"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_every_kind_repeats_to_the_bit(
    kind: str, threads: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_CACHE", str(cache))
    found = []
    for name in ("first", "second"):
        out = tmp_path / name
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            assert main([*SHARED_OUT, *KINDS[kind], "--out", str(out)]) == 0, said.getvalue()
        place = out / "checkpoints" / "step-2"
        assert place.is_dir()
        found.append(load_file(place / "model.safetensors") | load_file(place / "optimizer.safetensors"))
    first, second = found
    differing = [path for path in first if not torch.equal(first[path], second[path])]
    assert not differing, f"{len(differing)} of {len(first)} tensors at {threads} threads, such as {differing[0]}"
