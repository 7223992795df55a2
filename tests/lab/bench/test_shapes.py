"""The arithmetic behind the tables, by hand."""

import pytest

from some_moe.config import ConfigError, ModelConfig
from some_moe.lab.bench.shapes import (
    CPU_SHAPES,
    DEFAULT_SHAPES,
    LayerShape,
    find_chip,
    find_shape,
    layer_bytes,
    layer_flops,
    step_flops_per_token,
)

TINY = LayerShape(name="tiny", d_model=2, d_ffn=3, num_experts=4, top_k=2)


@pytest.mark.parametrize(
    ("which", "trainability", "factor"),
    [("forward", "frozen", 4), ("backward", "frozen", 4), ("both", "frozen", 8), ("both", "full", 12),
     ("backward", "full", 8), ("forward", "full", 4)],
)  # fmt: skip
def test_layer_flops_are_the_formula(which: str, trainability: str, factor: int) -> None:
    assert layer_flops(TINY, 10, which, trainability) == factor * 10 * 2 * 2 * 3


def test_low_rank_updates_add_their_own_three_products() -> None:
    # Both matrices: (d + f)·r numbers each; 2 operations a number, forward, input gradient and weight gradient.
    extra = layer_flops(TINY, 10, "both", "lora", lora_rank=5) - layer_flops(TINY, 10, "both")
    assert extra == 3 * 2 * (10 * 2) * 2 * 5 * (2 + 3)


def test_layer_bytes_count_each_thing_once() -> None:
    weights, x, hidden = 3 * (2 * 2 * 3 + 3 + 2), 10 * 2, 10 * 2 * 3
    assert layer_bytes(TINY, 10, "forward", "frozen", used_experts=3, width=2) == 2 * (weights + 2 * x)
    assert layer_bytes(TINY, 10, "both", "frozen", used_experts=3, width=2) == 2 * (2 * weights + 4 * x + 2 * hidden)
    trained = layer_bytes(TINY, 10, "both", "full", used_experts=3, width=2)
    assert trained == 2 * (3 * weights + 5 * x + 2 * hidden)


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
    sizes = [find_shape(name) for name in DEFAULT_SHAPES]
    assert [(s.d_model, s.d_ffn, s.num_experts, s.top_k) for s in sizes] == [
        (384, 1024, 64, 4), (512, 1024, 64, 4), (512, 1536, 256, 8), (512, 1024, 512, 4),
    ]  # fmt: skip


def test_presets_have_shapes_too() -> None:
    assert find_shape("demo") == LayerShape(name="demo", d_model=128, d_ffn=128, num_experts=16, top_k=2)
    assert [find_shape(name).name for name in CPU_SHAPES] == ["demo", "A1"]


def test_a_resized_shape_is_named_after_its_sizes() -> None:
    shape = find_shape("a1")
    assert shape.resize(d_model=384, top_k=None) is shape
    assert shape.resize(d_ffn=128, top_k=2).name == "d384-f128-E64-k2"
    with pytest.raises(ConfigError, match="top_k 9 is more than num_experts 8; lower top_k"):
        shape.resize(num_experts=8, top_k=9)


def test_peaks_are_known_for_sxm_chips_alone() -> None:
    chip = find_chip("NVIDIA H200")
    assert chip is not None
    assert (chip.flops, chip.bandwidth) == (989e12, 4.8e12)
    assert find_chip("NVIDIA H100 PCIe") is None
    assert find_chip("x86_64 CPU, 2 cores") is None
