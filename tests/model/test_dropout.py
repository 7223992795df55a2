"""Dropout falls where the hash says: the right share, the same however a batch is split, and only in training."""

import pytest
import torch
from torch import Tensor

from some_moe import SomeLM
from some_moe.hashing import make_salt
from some_moe.model.dropout import Dropout
from some_moe.model.tokens import TokenInfo
from tests.shared.variants import BASE

X = torch.ones(6, 40, 50)


def drop(share: float = 0.3, *, place: int = 1, seed: int = 0, step: int = 0, rows: slice = slice(None)) -> Tensor:
    info = TokenInfo.of((6, 40), torch.device("cpu"), seed=seed, step=step)
    part = TokenInfo(counted=info.counted[rows], rows=info.rows[rows], salt=info.salt)
    y: Tensor = Dropout(share, place)(X[rows], part)
    return y


def test_the_share_falls_away_and_the_mean_stays() -> None:
    y = drop()
    # 12,000 elements: four standard deviations of the share are 0.017.
    assert abs(float((y == 0).float().mean()) - 0.3) < 0.017
    assert y.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    for along in (0, 1, 2):  # no row, position or channel is favoured
        shares = (y == 0).float().mean([axis for axis in range(3) if axis != along])
        assert (shares - 0.3).abs().max() < 5 * (0.21 / (y.numel() / len(shares))) ** 0.5


def test_a_split_batch_loses_the_same_elements() -> None:
    assert torch.equal(torch.cat((drop(rows=slice(0, 2)), drop(rows=slice(2, 6)))), drop())


@pytest.mark.parametrize("other", [{"step": 1}, {"seed": 1}, {"place": 2}])
def test_another_step_seed_or_place_loses_others(other: dict[str, int]) -> None:
    agreement = ((drop() == 0) == (drop(**other) == 0)).float().mean()
    assert abs(float(agreement) - 0.58) < 0.02  # 0.3² + 0.7²: independent


def test_dropout_is_for_training_alone() -> None:
    model = SomeLM(BASE.override({"dropout": 0.5}))
    plain = SomeLM(BASE)
    tokens = torch.randint(0, BASE.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = plain(tokens).logits
    assert not torch.equal(model(tokens).logits, whole)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, whole)
    model.eval()
    assert torch.equal(model(tokens).logits, whole)


@pytest.mark.parametrize("changes", [{}, {"norm": "post"}, {"ffn": "dense", "dense_width": 40}], ids=str)
def test_gradients_of_a_whole_batch_are_those_of_its_parts(changes: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = SomeLM(BASE.override({"dropout": 0.2} | changes)).double()
    tokens, rows = torch.randint(0, BASE.vocab_size, (4, 9)), torch.arange(4)
    salt = make_salt(3, 5)
    found = []
    for parts in ((rows,), (rows[:1], rows[1:])):
        model.zero_grad()
        for part in parts:
            info = TokenInfo.of(tokens[part].shape, tokens.device, rows=part, salt=salt, ids=tokens[part])
            model(tokens[part], info).logits.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(found[0]) > 5
    for whole, summed in zip(*found, strict=True):
        assert torch.allclose(whole, summed, rtol=1e-10, atol=1e-12)
