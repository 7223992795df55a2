"""The integer hash is a bijection, equals its Python twin, and depends on every word of its key."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from some_moe.hashing import assign_experts, derive_key, hash_words, make_salt, mix_, mix_int, sample_order

WORDS = st.integers(0, 2**32 - 1)


def as_int32(word: int) -> torch.Tensor:
    return torch.tensor([word - 2**32 if word >= 2**31 else word], dtype=torch.int32)


@given(WORDS)
def test_tensors_and_integers_mix_alike(word: int) -> None:
    assert int(mix_(as_int32(word))) & 0xFFFFFFFF == mix_int(word)


def test_mixing_never_maps_two_words_to_one() -> None:
    words = torch.arange(1 << 20, dtype=torch.int32) * 4099
    assert len(mix_(words.clone()).unique()) == len(words.unique())


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), st.data())
def test_keys_depend_on_every_part(parts: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(parts) - 1))
    other = data.draw(st.integers(0, 2**64 - 1).filter(lambda value: value != parts[place]))
    assert derive_key(*parts) != derive_key(*parts[:place], other, *parts[place + 1 :])


def test_words_are_uniform_and_uncorrelated() -> None:
    words = hash_words(torch.arange(1 << 20, dtype=torch.int32), *derive_key(1, 2, 3)).double() / 2**31
    assert abs(words.mean()) < 4e-3
    assert abs(words.var() - 1 / 3) < 4e-3
    for lag in (1, 2, 384, 1024):
        assert abs((words[lag:] * words[:-lag]).mean()) < 3e-3
    other = hash_words(torch.arange(1 << 20, dtype=torch.int32), *derive_key(1, 2, 4)).double() / 2**31
    assert abs((words * other).mean()) < 3e-3


def test_sample_order_knows_only_seed_step_layer_row_and_position() -> None:
    rows = torch.tensor([4, 9, 2])
    whole = sample_order(make_salt(0, 5), 1, rows, 12)
    assert torch.equal(whole[1:2, :7], sample_order(make_salt(0, 5), 1, rows[1:2], 7))
    assert len(whole.unique()) == whole.numel()
    assert (whole >= 0).all()
    for salt, layer in ((make_salt(1, 5), 1), (make_salt(0, 6), 1), (make_salt(0, 5), 2)):
        assert not (sample_order(salt, layer, rows, 12) == whole).any()


def test_hash_routing_gives_each_token_different_experts_and_spreads_them() -> None:
    experts = assign_experts(torch.arange(4096), num_experts=16, top_k=4, seed=0, layer=0)
    assert all(len(set(row)) == 4 for row in experts.tolist())
    counts = torch.bincount(experts.reshape(-1), minlength=16)
    assert counts.min() > 0.85 * 1024
    assert counts.max() < 1.15 * 1024
