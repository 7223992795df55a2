"""Parameter counts by formula: the published ones to the printed digit, the studies by hand."""

import pytest

from some_moe.config import ModelConfig
from some_moe.config.parameters import ParameterCount, count_parameters, format_millions
from some_moe.lab.registry import find_experiment

# Read from the reports: name, trainable M, total M, trainable percent (None: not printed).
PRINTED = [
    ("mvp-v2", "5.52", "72.80", None),
    ("mvp-v3", "12.23", "213.91", None),
    ("mvp-v4", "12.23", "617.19", None),
    ("mvp-v5", "12.23", "213.91", None),
    ("mvp-v6", "13.71", "1526.11", None),
    ("V1", "5.52", "72.80", "7.6"),
    ("V2", "10.74", "313.27", "3.4"),
    ("V3", "18.92", "3244.34", "0.58"),
    ("V4", "17.04", "319.57", "5.3"),
    ("V5", "10.74", "1825.63", "0.59"),
    ("V6", "21.55", "693.62", "3.1"),
    ("V7", "10.74", "313.27", "3.4"),
    ("V8", "10.74", "313.27", "3.4"),
    ("V9", "10.74", "313.27", "3.4"),
    ("V10", "10.74", "313.27", "3.4"),
    ("A1", "15.77", "419.14", "3.76"),
    ("A2", "25.22", "562.88", "4.48"),
    ("A3", "18.14", "522.36", "3.47"),
    ("A4", "29.42", "701.50", "4.19"),
    ("A5", "20.51", "625.57", "3.28"),
    ("A6", "42.04", "1117.36", "3.76"),
    ("B1", "29.42", "1373.57", "2.14"),
    ("B2", "29.42", "2717.71", "1.08"),
    ("B3", "29.42", "5406.00", "0.54"),
]

SMALL = {"d_model": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 10, "num_experts": 3, "d_ffn": 5, "top_k": 2}
# Embedding 80, head 90, two LayerNorms 32, attention 4·64 + 32.
SMALL_BACKBONE = 80 + 90 + 32 + 288
# The mlp query network 8→16→8 with biases, and one expert 8→5→8 with biases.
SMALL_QUERY = 2 * 8 * 16 + 16 + 8
SMALL_EXPERT = 2 * 8 * 5 + 5 + 8
SMALL_GATED = 3 * 8 * 5 + 2 * 5 + 8


@pytest.mark.parametrize(("name", "trainable", "total", "percent"), PRINTED)
def test_counts_equal_the_printed_digits(name: str, trainable: str, total: str, percent: str | None) -> None:
    count = find_experiment(name).parameters
    assert format_millions(count.trainable) == trainable
    assert format_millions(count.total) == total
    if percent is not None:
        decimals = len(percent.split(".")[1])
        assert f"{count.trainable_percent:.{decimals}f}" == percent


@pytest.mark.parametrize(("name", "trainable", "total", "percent"), PRINTED)
def test_the_record_holds_the_printed_counts(name: str, trainable: str, total: str, percent: str | None) -> None:
    published = find_experiment(name).published
    assert published is not None
    assert str(published.trainable_parameters_millions) == trainable
    assert str(published.total_parameters_millions) == total
    assert published.trainable_percent is None if percent is None else str(published.trainable_percent) == percent


def test_listed_sizes_that_contradict_the_counts_do_not_reproduce_them() -> None:
    mvp_v2 = find_experiment("mvp-v2").config.model.model_dump()
    assert format_millions(count_parameters(ModelConfig(**mvp_v2 | {"num_experts": 64})).total) == "140.07"
    v5 = find_experiment("V5").config.model.model_dump()
    assert format_millions(count_parameters(ModelConfig(**v5 | {"vocab_size": 16384})).trainable) == "17.04"


@pytest.mark.parametrize(
    ("changes", "trainable", "frozen"),
    [
        ({}, SMALL_QUERY, 3 * SMALL_EXPERT),
        ({"query": "linear"}, 8 * 8 + 8, 3 * SMALL_EXPERT),
        ({"query_hidden": 4}, 2 * 8 * 4 + 4 + 8, 3 * SMALL_EXPERT),
        ({"router": "hash"}, 0, 3 * SMALL_EXPERT),
        ({"router": "learned"}, SMALL_QUERY + 3 * 8, 3 * SMALL_EXPERT),
        ({"router": "weights"}, SMALL_QUERY, 3 * SMALL_EXPERT),
        ({"learn_temperature": True}, SMALL_QUERY + 1, 3 * SMALL_EXPERT),
        ({"trainability": "full"}, SMALL_QUERY + 3 * SMALL_EXPERT, 0),
        ({"trainability": "lora", "lora_rank": 2}, SMALL_QUERY + 3 * 2 * 2 * 13, 3 * SMALL_EXPERT),
        ({"gains": True}, SMALL_QUERY + 3 * 5, 3 * SMALL_EXPERT),
        ({"activation": "swiglu"}, SMALL_QUERY, 3 * SMALL_GATED),
        (
            {"activation": "swiglu", "trainability": "lora", "lora_rank": 2},
            SMALL_QUERY + 3 * 2 * (8 + 10 + 5 + 8),
            3 * SMALL_GATED,
        ),
        ({"activation": "swiglu", "shared_expert": 7}, SMALL_QUERY + 3 * 8 * 7 + 14 + 8, 3 * SMALL_GATED),
        ({"activation": "swiglu", "ffn": "dense", "dense_width": 6}, 3 * 8 * 6 + 12 + 8, 0),
        ({"shared_down": True}, SMALL_QUERY + 5 * 8 + 8, 3 * (8 * 5 + 5)),
        ({"shared_expert": 7}, SMALL_QUERY + 2 * 8 * 7 + 7 + 8, 3 * SMALL_EXPERT),
        ({"output_scale": True}, SMALL_QUERY + 1, 3 * SMALL_EXPERT),
        ({"ffn": "dense", "dense_width": 6}, 2 * 8 * 6 + 6 + 8, 0),
        ({"ffn": "frozen_dense", "dense_width": 6}, 0, 2 * 8 * 6 + 6 + 8),
    ],
    ids=str,
)
def test_one_block_counts_as_by_hand(changes: dict[str, object], trainable: int, frozen: int) -> None:
    count = count_parameters(ModelConfig(**SMALL | changes))
    learned = SMALL_BACKBONE + trainable
    assert count == ParameterCount(trainable=learned, total=learned + frozen)


def test_blocks_add_up() -> None:
    one, three = (count_parameters(ModelConfig(**SMALL | {"num_layers": n})) for n in (1, 3))
    block = one.total - 80 - 90
    assert three.total == 80 + 90 + 3 * block
