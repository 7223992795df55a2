"""The arithmetic behind the tables, by hand."""

import pytest

from some_moe.config import ConfigError, ModelConfig
from some_moe.lab.bench.shapes import (
    CPU_SHAPES,
    DEFAULT_SHAPES,
    PEAK_FLOPS,
    find_shape,
    layer_flops,
    step_flops_per_token,
)

TINY = ModelConfig(d_model=16, num_heads=2, d_ffn=3, num_experts=4, top_k=2, lora_rank=2)


@pytest.mark.parametrize(("trainability", "factor"), [("frozen", 8), ("full", 12)])
def test_layer_flops_are_the_formula(trainability: str, factor: int) -> None:
    model = TINY.model_copy(update={"trainability": trainability})
    assert layer_flops(model, 10) == factor * 10 * 2 * 16 * 3


def test_low_rank_updates_add_their_own_three_products() -> None:
    # Both matrices: (d + f)·r numbers each; 2 operations a number, forward, input gradient and weight gradient.
    extra = layer_flops(TINY.model_copy(update={"trainability": "lora"}), 10) - layer_flops(TINY, 10)
    assert extra == 3 * 2 * (10 * 2) * 2 * 2 * (16 + 3)


def test_a_frozen_step_costs_what_the_formula_says() -> None:
    model = ModelConfig(d_model=8, num_layers=3, num_heads=2, vocab_size=50, num_experts=5, d_ffn=7, top_k=2)
    d, L, V, E, f, k, T = 8, 3, 50, 5, 7, 2, 11
    trainable = 2 * V * d + V + L * (4 * d * d + 4 * d + (4 * d * d + 3 * d) + 4 * d)
    expected = 6 * (trainable - V * d) + 8 * k * d * f * L + 6 * L * T * d + 4 * E * d * L
    assert step_flops_per_token(model, T) == expected
    trained = model.model_copy(update={"trainability": "full"})
    assert step_flops_per_token(trained, T) == expected + 4 * k * d * f * L


def test_other_feed_forward_layers_are_counted_too() -> None:
    sizes = {"d_model": 8, "num_layers": 3, "num_heads": 2, "vocab_size": 50}
    dense = step_flops_per_token(ModelConfig(**sizes, ffn="dense", dense_width=20), 11)
    frozen = step_flops_per_token(ModelConfig(**sizes, ffn="frozen_dense", dense_width=20), 11)
    assert dense - frozen == 3 * (12 * 8 * 20 - 8 * 8 * 20 + 6 * (20 + 8))
    by_hash = step_flops_per_token(ModelConfig(**sizes, num_experts=5, d_ffn=7, top_k=2, router="hash"), 11)
    by_keys = step_flops_per_token(ModelConfig(**sizes, num_experts=5, d_ffn=7, top_k=2, query="linear"), 11)
    assert by_keys - by_hash == 3 * (6 * (8 * 8 + 8) + 4 * 5 * 8)


def test_default_shapes_are_the_registered_ones() -> None:
    models = [find_shape(name).model for name in DEFAULT_SHAPES]
    assert [(m.d_model, m.d_ffn, m.num_experts, m.top_k) for m in models] == [
        (384, 1024, 64, 4), (512, 1024, 64, 4), (512, 1536, 256, 8), (512, 1024, 512, 4),
    ]  # fmt: skip


def test_presets_have_shapes_too() -> None:
    demo = find_shape("demo").model
    assert (demo.d_model, demo.d_ffn, demo.num_experts, demo.top_k) == (128, 128, 16, 2)
    assert [find_shape(name).name for name in CPU_SHAPES] == ["demo", "A1"]


def test_a_shape_is_trained_as_asked() -> None:
    assert find_shape("full-training").model.trainability == "frozen"
    assert find_shape("a1", "full").model.trainability == "full"
    assert find_shape("lora-4", "lora").model.lora_rank == 4
    with pytest.raises(ConfigError, match="has no experts to measure"):
        find_shape("dense-equal-trainable")


def test_peaks_are_known_for_sxm_chips_alone() -> None:
    assert PEAK_FLOPS["NVIDIA H200"] == 989e12
    assert "NVIDIA H100 PCIe" not in PEAK_FLOPS
    assert "x86_64 CPU, 2 cores" not in PEAK_FLOPS
