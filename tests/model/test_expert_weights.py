"""Expert weights are a pure function of (seed, layer, expert, matrix, index): same bits, any order."""

import itertools
import math

import pytest
import torch

from some_moe.config import ConfigError, ModelConfig
from some_moe.model.expert_weights import MATRICES, checksum, fill_experts
from some_moe.model.library import ExpertLibrary, make_library

CONFIG = ModelConfig(d_model=24, num_heads=2, num_experts=5, d_ffn=40, top_k=2, vocab_size=50)

# Made once and committed: a change here means that every saved frozen model has lost its experts.
GOLDEN = {
    "default": "f8f3c0becf16fcea",
    "sparse": "fc8900b73f01728b",
    "bfloat16": "28db80812bb85682",
}


def test_golden_checksums_hold() -> None:
    found = {
        "default": ExpertLibrary(CONFIG, layer=1).describe()["checksum"],
        "sparse": ExpertLibrary(CONFIG.override({"init_method": "sparse"}), layer=1).describe()["checksum"],
        "bfloat16": ExpertLibrary(CONFIG.override({"expert_dtype": "bfloat16"}), layer=1).describe()["checksum"],
    }
    assert found == GOLDEN


def fill(expert: int = 0, *, seed: int = 0, layer: int = 0, matrix: str = "up", size: int = 200) -> torch.Tensor:
    out = torch.empty(1, size)
    fill_experts(out, matrix, bound=0.5, seed=seed, layer=layer, experts=[expert])
    return out[0]


def test_order_of_generation_does_not_matter() -> None:
    together, backwards = torch.empty(7, 3, 11), torch.empty(7, 3, 11)
    fill_experts(together, "down", bound=1.0, seed=3, layer=2)
    fill_experts(backwards, "down", bound=1.0, seed=3, layer=2, experts=range(6, -1, -1))
    assert torch.equal(together, backwards.flip(0))
    alone = torch.empty(1, 3, 11)
    fill_experts(alone, "down", bound=1.0, seed=3, layer=2, experts=[4])
    assert torch.equal(together[4:5], alone)


def test_long_matrices_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fill(size=5000)
    monkeypatch.setattr("some_moe.model.expert_weights._CHUNK", 17)
    assert torch.equal(fill(size=5000), whole)


def test_changing_one_coordinate_changes_the_bits() -> None:
    variants = [
        fill(),
        fill(expert=1),
        fill(seed=1),
        fill(seed=2**40),
        fill(layer=1),
        *(fill(matrix=matrix) for matrix in MATRICES if matrix != "up"),
    ]
    for left, right in itertools.combinations(variants, 2):
        assert (left == right).float().mean() < 0.02


def test_default_weights_are_uniform_within_one_over_root_fan_in() -> None:
    library = ExpertLibrary(CONFIG.override({"num_experts": 64}), layer=0)
    for stack, fan_in in (
        (library.up, 24),
        (library.up_bias, 24),
        (library.down, 40),
        (library.down_bias, 40),
    ):
        bound = 1 / math.sqrt(fan_in)
        assert stack.abs().max() <= bound
        assert stack.abs().max() > 0.99 * bound
        assert abs(stack.mean()) < 0.03 * bound
        assert abs(stack.var() / (bound**2 / 3) - 1) < 0.06


def test_sparse_weights_have_the_stated_zeros_and_the_same_variance() -> None:
    library = ExpertLibrary(CONFIG.override({"num_experts": 64, "init_method": "sparse"}), layer=0)
    for stack, fan_in in ((library.up, 24), (library.down, 40)):
        assert abs((stack == 0).float().mean() - 0.9) < 0.01
        assert abs(stack.var() * 3 * fan_in - 1) < 0.06
        assert stack.abs().max() <= 1 / math.sqrt(fan_in * 0.1) + 1e-6
    assert (library.up_bias != 0).all()


def test_orthogonal_weights_are_orthonormal_along_the_shorter_side() -> None:
    library = ExpertLibrary(CONFIG.override({"init_method": "orthogonal"}), layer=0)
    eye = torch.eye(24)
    for expert in range(5):
        assert torch.allclose(library.up[expert].T @ library.up[expert], eye, atol=1e-5)
        assert torch.allclose(library.down[expert] @ library.down[expert].T, eye, atol=1e-5)
    assert not torch.allclose(library.up[0], library.up[1])


def test_only_what_cannot_be_regenerated_is_saved() -> None:
    assert not make_library(CONFIG, 0).state_dict()
    assert set(make_library(CONFIG.override({"trainability": "full"}), 0).state_dict()) == set(MATRICES)
    assert set(make_library(CONFIG.override({"init_method": "orthogonal"}), 0).state_dict()) == set(MATRICES)
    lora = make_library(CONFIG.override({"trainability": "lora"}), 0)
    assert set(lora.state_dict()) == {"up_in", "up_out", "down_in", "down_out"}


def test_trained_experts_start_from_the_frozen_bits() -> None:
    frozen = make_library(CONFIG, 3)
    trained = make_library(CONFIG.override({"trainability": "full"}), 3)
    assert checksum(frozen.stacks()) == checksum(trained.stacks())
    assert all(p.requires_grad for p in trained.parameters())


def test_bfloat16_is_the_rounded_float32() -> None:
    full, half = ExpertLibrary(CONFIG, 0), ExpertLibrary(CONFIG.override({"expert_dtype": "bfloat16"}), 0)
    assert half.up.dtype == torch.bfloat16
    assert torch.equal(full.up.bfloat16(), half.up)


def test_one_flipped_bit_changes_the_checksum() -> None:
    library = ExpertLibrary(CONFIG, 0)
    before = library.describe()
    library.verify(before)
    library.down.view(torch.int32)[2, 3, 4] ^= 1
    with pytest.raises(ConfigError, match="the experts of layer 0 have checksum"):
        library.verify(before)


def test_swapped_experts_change_the_checksum() -> None:
    library = ExpertLibrary(CONFIG, 0)
    swapped = [stack[[1, 0, 2, 3, 4]] for stack in library.stacks()]
    assert checksum(library.stacks()) != checksum(swapped)


@pytest.mark.gpu
def test_gpu_and_cpu_make_the_same_bits() -> None:
    for overrides in ({}, {"init_method": "sparse"}, {"expert_dtype": "bfloat16"}):
        config = CONFIG.override(overrides)
        cpu, gpu = ExpertLibrary(config, 1), ExpertLibrary(config, 1, device="cuda")
        assert cpu.describe() == gpu.describe()
        for left, right in zip(cpu.stacks(), gpu.stacks(), strict=True):
            assert torch.equal(left, right.cpu())
