"""Loss conventions on hand-made numbers; the same loss for every way of batching; still keys."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from some_moe.config import DataConfig, GravityConfig, ModelConfig, RunConfig
from some_moe.data.batches import Batch, Batches, Rows
from some_moe.data.tokenizer import BOS, EOS, PAD
from some_moe.model.transformer import SomeLM, token_cross_entropy
from some_moe.training.evaluate import Tally, evaluate, forward

MODEL = ModelConfig(d_model=16, num_layers=2, num_heads=2, vocab_size=20, num_experts=4, d_ffn=8, top_k=2)
SIZES = np.array([0, 0, 0, *[2] * 17])  # every ordinary token stands for two bytes


def make_config(**data: object) -> RunConfig:
    return RunConfig(model=MODEL, data=DataConfig(**({"seq_len": 24, "batch_size": 3} | data)))  # type: ignore[arg-type]


def make_rows(lengths: list[int], seed: int = 0) -> Rows:
    random = np.random.default_rng(seed)
    stories = [np.array([BOS, *random.integers(3, 20, n - 1), EOS], dtype=np.uint16) for n in lengths]
    return Rows(np.concatenate(stories), np.cumsum([0, *map(len, stories)]))


ROWS = make_rows([5, 24, 11, 2, 17, 8, 9])


def test_every_loss_equals_the_number_computed_by_hand() -> None:
    # One row: bos 5 | targets 5, eos, pad, pad. The model gives the four targets the chances below.
    chances = [1 / 2, 1 / 4, 1 / 8, 1 / 16]
    targets = torch.tensor([[5, EOS, PAD, PAD]])
    logits = torch.zeros(1, 4, 20, dtype=torch.float64)
    for place, (target, chance) in enumerate(zip(targets[0].tolist(), chances, strict=True)):
        logits[0, place] = math.log((1 - chance) / 19)
        logits[0, place, target] = math.log(chance)
    batch = Batch(
        inputs=torch.tensor([[BOS, 5, EOS, PAD]]),
        targets=targets,
        real=torch.tensor([[True, True, False, False]]),
        rows=torch.tensor([0]),
    )
    config = make_config(batching="padded", loss_on="all_positions")
    tally = Tally(SomeLM(MODEL), config, SIZES, torch.device("cpu"))
    tally.add(batch, token_cross_entropy(logits, batch.targets), ())
    found = tally.result()
    ln2 = math.log(2)
    assert found.loss == pytest.approx(1.5 * ln2)  # (1 + 2)/2 bits
    assert found.loss_on_padding == pytest.approx(3.5 * ln2)  # (3 + 4)/2 bits
    assert found.loss_padded == pytest.approx(2.5 * ln2)  # (1 + 2 + 3 + 4)/4 bits
    assert found.text_share == 0.5
    assert found.loss_padded == pytest.approx(0.5 * found.loss + 0.5 * found.loss_on_padding)
    assert found.perplexity == pytest.approx(2**1.5)
    assert found.bits_per_byte == pytest.approx(3 / 2)  # 3 bits for one token of two bytes; eos has none
    assert (found.num_tokens, found.num_bytes) == (2, 2)


def test_padded_loss_is_the_mixture_of_its_parts_and_null_where_padding_is_no_target() -> None:
    model = SomeLM(MODEL)
    found = evaluate(model, ROWS, make_config(batching="padded", loss_on="all_positions"), SIZES, torch.device("cpu"))
    assert found.loss_on_padding is not None
    share = found.text_share
    assert share == pytest.approx(sum([5, 24, 11, 2, 17, 8, 9]) / (7 * 24))
    assert found.loss_padded == pytest.approx(share * found.loss + (1 - share) * found.loss_on_padding, rel=1e-12)
    text = evaluate(model, ROWS, make_config(batching="padded"), SIZES, torch.device("cpu"))
    assert (text.loss_on_padding, text.loss_padded) == (None, None)
    assert text.loss == pytest.approx(found.loss, rel=1e-5)


def test_bits_per_byte_agree_with_a_direct_count_of_bytes() -> None:
    found = evaluate(SomeLM(MODEL), ROWS, make_config(), SIZES, torch.device("cpu"))
    num_bytes = sum(2 for story in ROWS.to_lists() for token in story if token > 2)
    assert found.num_bytes == num_bytes
    total_bits = found.loss * found.num_tokens / math.log(2)
    assert found.bits_per_byte == pytest.approx(total_bits / num_bytes)


def losses_by_story(model: SomeLM, batching: str) -> dict[tuple[int, ...], float]:
    """{story: its mean loss} under one way of batching."""
    config = make_config(batching=batching)
    batches = Batches(ROWS, config.data, rows_a_step=3, seed=0, keep_partial=True)
    losses = {}
    for batch in batches.epoch(0):
        with torch.no_grad():
            nats = token_cross_entropy(forward(model, batch, config).logits, batch.targets)
        starts = (batch.inputs == BOS).nonzero().tolist()
        for row, start in starts:
            end = start + 1
            while end < batch.real.shape[1] and batch.real[row, end] and batch.inputs[row, end] != BOS:
                end += 1
            losses[tuple(batch.targets[row, start:end].tolist())] = float(nats[row, start:end].mean())
    return losses


@pytest.mark.parametrize("positions", ["rope", "alibi", "sinusoidal"])
def test_padded_bucketed_and_packed_give_the_same_loss_per_story(positions: str) -> None:
    model = SomeLM(MODEL.override({"positions": positions}))
    padded, bucketed, packed = (losses_by_story(model, batching) for batching in ("padded", "bucketed", "packed"))
    assert len(padded) == 7
    for other in (bucketed, packed):
        assert other.keys() == padded.keys()
        for story, loss in padded.items():
            assert other[story] == pytest.approx(loss, abs=1e-5)


def keys_of(model: SomeLM) -> list[Tensor]:
    return [layer.state.keys.clone() for layer in model.layers if layer.state is not None]


def test_evaluation_moves_no_key() -> None:
    model = SomeLM(MODEL, GravityConfig(alpha=0.5))
    before = keys_of(model)
    evaluate(model, ROWS, make_config(), SIZES, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(before, keys_of(model), strict=True))


def test_usage_is_over_real_tokens_or_over_all_positions() -> None:
    model = SomeLM(MODEL)
    real = evaluate(model, ROWS, make_config(batching="padded"), SIZES, torch.device("cpu"))
    every = evaluate(model, ROWS, make_config(batching="padded", count_padding=True), SIZES, torch.device("cpu"))
    for left, right in zip(real.layers, every.layers, strict=True):
        assert right["gini_real"] == pytest.approx(left["gini"])
        assert right["entropy_bits_real"] == pytest.approx(left["entropy_bits"])
        assert right["gini"] != pytest.approx(left["gini"], abs=1e-6)


@pytest.mark.parametrize("batching", ["bucketed", "padded", "packed"])
def test_the_losses_of_stories_add_up_to_the_loss_and_stand_in_document_order(batching: str) -> None:
    model = SomeLM(MODEL)
    config = make_config(batching=batching)
    found = evaluate(model, ROWS, config, SIZES, torch.device("cpu"))
    assert found.stories is not None
    assert found.stories["tokens"] == [5, 24, 11, 2, 17, 8, 9]
    assert sum(found.stories["nats"]) / 76 == pytest.approx(found.loss, abs=1e-3)
    alone = evaluate(model, Rows(ROWS[4], np.array([0, len(ROWS[4])])), config, SIZES, torch.device("cpu"))
    assert found.stories["nats"][4] == pytest.approx(alone.loss * 17, abs=0.011)
    assert "stories" not in found.to_dict()


def test_the_rows_of_a_long_document_are_one_story() -> None:
    # Three documents; the second is split: its second row begins with the id that the first row ends with.
    rows = [[BOS, 5, EOS], [BOS, 6, 7, 8], [8, 9, EOS], [BOS, 4, EOS]]
    split = Rows(np.concatenate([np.array(row, np.uint16) for row in rows]), np.cumsum([0, *map(len, rows)]))
    found = evaluate(SomeLM(MODEL), split, make_config(batch_size=2), SIZES, torch.device("cpu"))
    assert found.stories is not None
    assert found.stories["tokens"] == [2, 5, 2]
    assert sum(found.stories["nats"]) == pytest.approx(found.loss * 9, abs=0.02)
