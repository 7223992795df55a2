"""Row lengths: the constant predictor by hand, rows cut as if encoded so, and figures that equal an evaluation's."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from some_moe.config import DataConfig, GravityConfig, ModelConfig, RunConfig
from some_moe.data.batches import Rows, encode_rows
from some_moe.data.tokenizer import BOS, EOS, PAD, Tokenizer
from some_moe.lab.lengths import (
    constant_loss,
    count_cut,
    count_targets,
    cut_rows,
    resize,
    score_lengths,
    without_padding,
)
from some_moe.model.transformer import SomeLM
from some_moe.training.evaluate import evaluate

CPU = torch.device("cpu")
TEXTS = [" ".join(["a cat sat on a mat"] * times) for times in (1, 2, 3, 5, 1, 4, 2)]
TOKENIZER = Tokenizer.train(TEXTS, 280)
ROWS = encode_rows(TEXTS, TOKENIZER, 96)
MODEL = ModelConfig(d_model=16, num_layers=3, num_heads=2, vocab_size=288, num_experts=4, d_ffn=8, top_k=2)
CONVENTIONS = {
    "text, bucketed": {"batching": "bucketed"},
    "text, packed": {"batching": "packed"},
    "text, padded": {"batching": "padded"},
    "all positions": {"batching": "padded", "loss_on": "all_positions", "count_padding": True},
}


def make_config(**data: object) -> RunConfig:
    return RunConfig(model=MODEL, data=DataConfig(**({"seq_len": 24, "batch_size": 3} | data)))  # type: ignore[arg-type]


def score(config: RunConfig, *lengths: int, model: SomeLM | None = None) -> list[SimpleNamespace]:
    scores = score_lengths(model or SomeLM(config.model), ROWS, ROWS, lengths, config, TOKENIZER)
    return [SimpleNamespace(**found) for found in scores]


def make_rows(*stories: list[int]) -> Rows:
    return Rows(np.concatenate([np.array(s, np.uint16) for s in stories]), np.cumsum([0, *map(len, stories)]))


# --- the constant predictor -------------------------------------------------------------------------------


def test_the_constant_predictor_equals_the_number_computed_by_hand() -> None:
    # Six ids. Learned from at length 4: 3 3 4 eos | 5 eos pad pad. Asked: 3 eos pad pad.
    learned = count_targets(make_rows([BOS, 3, 3, 4, EOS], [BOS, 5, EOS]), 4, 6)
    asked = count_targets(make_rows([BOS, 3, EOS]), 4, 6)
    assert learned.tolist() == [2, 0, 2, 2, 1, 1]
    assert asked.tolist() == [2, 0, 1, 1, 0, 0]
    # Padding counted: eight targets and one for each of six ids; pad, eos and 3 have 3 of 14 each.
    assert constant_loss(learned, asked) == pytest.approx(math.log(14 / 3))
    # Real ones alone: six targets and six; 3 and eos have 3 of 12 each.
    assert constant_loss(without_padding(learned), without_padding(asked)) == pytest.approx(math.log(4))
    assert learned[PAD] == 2  # the counts with padding are left as they were


def test_an_id_never_seen_costs_the_added_one() -> None:
    assert constant_loss(np.array([0, 0, 3, 0]), np.array([0, 0, 0, 1])) == pytest.approx(math.log(7))


def test_longer_rows_make_the_padded_constant_fall_and_leave_the_honest_one() -> None:
    short, long = score(make_config(seq_len=96), 48, 96)
    assert short.num_stories_cut == long.num_stories_cut == 0
    assert long.constant_loss_padded < short.constant_loss_padded < short.constant_loss
    assert long.constant_loss == short.constant_loss


# --- rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [2, 9, 20, 95, 200])
def test_rows_cut_later_are_the_rows_encoded_shorter(seq_len: int) -> None:
    cut, encoded = cut_rows(ROWS, seq_len), encode_rows(TEXTS, TOKENIZER, min(seq_len, 96))
    assert cut.to_lists() == encoded.to_lists()
    assert cut.ids.dtype == encoded.ids.dtype
    assert cut.num_cut == encoded.num_cut


def test_a_story_counts_as_cut_when_it_lost_its_eos() -> None:
    longest = int(ROWS.lengths.max())
    assert count_cut(ROWS) == 0
    assert count_cut(cut_rows(ROWS, longest)) == 0
    assert count_cut(cut_rows(ROWS, longest - 1)) == 1
    assert count_cut(cut_rows(ROWS, 2)) == len(ROWS)


def test_a_batch_of_longer_rows_has_fewer_of_them() -> None:
    config = make_config(seq_len=24, batch_size=12)
    sizes = [resize(config, seq_len).data.batch_size for seq_len in (6, 24, 48, 1000)]
    assert sizes == [12, 12, 6, 1]


# --- the model's figures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
def test_at_the_runs_own_length_the_figures_are_those_of_an_evaluation(convention: dict[str, object]) -> None:
    config = make_config(**convention)
    model = SomeLM(MODEL)
    found = evaluate(model, cut_rows(ROWS, 24), config, TOKENIZER.token_bytes(), CPU)
    (scored,) = score(config, 24, model=model)
    for name in ("loss", "perplexity", "bits_per_byte", "num_tokens"):
        assert getattr(scored, name) == getattr(found, name)
    middle = found.layers[1]
    if config.data.count_padding:
        assert (scored.loss_on_padding, scored.loss_padded) == (found.loss_on_padding, found.loss_padded)
        assert (scored.gini, scored.gini_padded) == (middle["gini_real"], middle["gini"])
        assert (scored.entropy_bits, scored.entropy_bits_padded) == (
            middle["entropy_bits_real"],
            middle["entropy_bits"],
        )
        assert scored.text_share == found.text_share
    else:
        assert (scored.gini, scored.entropy_bits) == (middle["gini"], middle["entropy_bits"])
        assert scored.gini_padded != scored.gini


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
def test_padded_loss_is_the_mixture_of_its_parts_for_every_run(convention: dict[str, object]) -> None:
    for scored in score(make_config(**convention), 12, 24, 64):
        share = scored.text_share
        assert share == pytest.approx(np.minimum(ROWS.lengths, scored.seq_len).sum() / (len(ROWS) * scored.seq_len))
        assert scored.loss_on_padding is not None
        assert scored.loss_padded == pytest.approx(share * scored.loss + (1 - share) * scored.loss_on_padding)


def test_rows_without_padding_have_one_loss() -> None:
    (scored,) = score(make_config(), 2)
    assert (scored.text_share, scored.loss_on_padding, scored.num_stories_cut) == (1.0, None, len(ROWS))
    assert scored.loss_padded == scored.loss
    assert scored.constant_loss_padded == scored.constant_loss


@pytest.mark.parametrize("positions", ["rope", "alibi", "sinusoidal"])
def test_whole_stories_cost_the_same_in_longer_rows(positions: str) -> None:
    config = make_config(seq_len=48).override({"model.positions": positions})
    short, long = score(config, 48, 96)
    assert long.num_tokens == short.num_tokens
    assert long.loss == pytest.approx(short.loss, abs=1e-5)


def test_a_model_without_experts_has_no_usage() -> None:
    dense = MODEL.override({"ffn": "dense", "dense_width": 16})
    config = RunConfig(model=dense, gravity=GravityConfig.off(), data=make_config().data)
    (scored,) = score(config, 24)
    assert (scored.gini, scored.gini_padded, scored.entropy_bits, scored.entropy_bits_padded) == (None,) * 4
