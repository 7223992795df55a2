"""Generated text: the cache changes nothing, seeds repeat, and the settings do what they say."""

from collections.abc import Iterator
from typing import cast

import pytest
import torch

from some_moe import SomeLM
from some_moe.config import ConfigError
from some_moe.data.tokenizer import Tokenizer
from some_moe.errors import FailureError
from some_moe.model.tokens import TokenInfo
from some_moe.sampling import Chooser, Sampling, choose_token
from some_moe.training import generation
from some_moe.training.generation import generate_tokens
from tests.shared.variants import BASE, MODELS, make_config, make_gravity

PROMPT = torch.randint(0, 61, (3, 5), generator=torch.Generator().manual_seed(0))


def generate(model: SomeLM, count: int, *, seed: int, **options: float) -> torch.Tensor:
    """The continuation (3, count) of PROMPT."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(list(generate_tokens(model, PROMPT, count, generator=generator, **options)), dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_cached_generation_gives_the_same_tokens_as_recomputing(name: str) -> None:
    model = SomeLM(make_config(name), make_gravity(name))
    for options in ({}, {"temperature": 1.0, "top_p": 0.9}):
        found = generate(model, 12, seed=1, **options)
        assert found.shape == (3, 12)
        tokens, generator = PROMPT, torch.Generator().manual_seed(1)
        for _ in range(12):
            info = TokenInfo.of(tokens.shape, tokens.device, ids=tokens)
            with torch.no_grad():
                logits = model(tokens, info).logits[:, -1]
            chosen = choose_token(logits, options.get("temperature", 0.0), options.get("top_p", 1.0), generator)
            tokens = torch.cat((tokens, chosen[:, None]), dim=1)
        assert torch.equal(found, tokens[:, 5:])


def test_a_cached_chunk_equals_token_by_token() -> None:
    from some_moe.model.attention import Cache

    model = SomeLM(BASE.override({"positions": "alibi"})).double()
    whole = model(PROMPT).logits
    cache = Cache(5)
    parts = [model(PROMPT[:, a:b], cache=cache).logits for a, b in ((0, 2), (2, 4), (4, 5))]
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-12)


def test_same_generator_seed_gives_the_same_text() -> None:
    model = SomeLM(BASE)
    first, again, other = (generate(model, 10, seed=seed, temperature=1.0) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_generation_stops_when_every_row_has_ended() -> None:
    model = SomeLM(BASE)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
        model.head.bias[9] = 1.0
    assert len(list(generate_tokens(model, PROMPT, 10, stop=9))) == 1
    assert len(list(generate_tokens(model, PROMPT, 10, stop=8))) == 10


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)
    generator = torch.Generator().manual_seed(0)
    assert set(choose_token(logits, 1.0, 0.79, generator).tolist()) == {0, 1}
    assert set(choose_token(logits, 1.0, 0.81, generator).tolist()) == {0, 1, 2}
    assert set(choose_token(logits, 1.0, 0.01, generator).tolist()) == {0}
    assert set(choose_token(logits, 0.0, 1.0, None).tolist()) == {0}


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        list(generate_tokens(SomeLM(BASE), PROMPT[:, :0], 3))


def test_top_k_keeps_the_likeliest_and_the_same_draw_where_it_keeps_all() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)
    generator = torch.Generator().manual_seed(0)
    assert set(choose_token(logits, 1.0, 1.0, generator, 2).tolist()) == {0, 1}
    assert set(choose_token(logits, 5.0, 0.99, generator, 3).tolist()) == {0, 1, 2}
    draws = [choose_token(logits, 1.0, 0.9, torch.Generator().manual_seed(1), top_k) for top_k in (None, 4, 99)]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


def test_a_repetition_penalty_makes_what_was_there_less_likely() -> None:
    model = SomeLM(BASE)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.arange(model.model.vocab_size) / 100 + 1)
    last = model.model.vocab_size - 1
    plain = [token[0].item() for token in generate_tokens(model, PROMPT, 3)]
    varied = [token[0].item() for token in generate_tokens(model, PROMPT, 3, repetition_penalty=5.0)]
    assert plain == [last] * 3
    assert varied == [token for token in range(last, 0, -1) if token not in PROMPT[0]][:3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 1e-45}, "temperature 1e-45 is out of range; use 0 for the likeliest token, or 0.001 and more"),
        ({"temperature": float("nan")}, "temperature nan is out of range"),
        ({"top_p": 0.0}, "top_p 0.0 is out of range"),
        ({"top_k": 0}, "top_k 0 is out of range"),
        ({"repetition_penalty": -1.0}, "repetition_penalty -1.0 is out of range"),
    ],
)
def test_settings_that_give_no_numbers_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(generate_tokens(SomeLM(BASE), PROMPT, 3, **options))


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens 1180591620717411303424 is out of range; use 1 to 100,000"):
        list(generate_tokens(SomeLM(BASE), PROMPT, 2**70))


class Letters:
    """A tokenizer of one id a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def test_it_stops_before_a_stop_text_that_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(*_: object, **__: object) -> Iterator[torch.Tensor]:
        yield from (torch.tensor([byte]) for byte in "Anna é THE ENA THE END. More".encode())

    monkeypatch.setattr(generation, "generate_tokens", tell)
    model, letters = SomeLM(BASE), cast("Tokenizer", Letters())
    pieces = list(generation.stream_text(model, letters, "", 99, stop=["THE END", "zzz"]))
    assert "".join(pieces) == "Anna é THE ENA "
    assert "é" in pieces
    assert "THE ENA" in pieces
    assert "".join(generation.stream_text(model, letters, "", 99, stop=["More!"])) == "Anna é THE ENA THE END. More"


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_a_model_that_gives_no_number_is_a_sentence(logit: float) -> None:
    with pytest.raises(FailureError, match="the model gives no number for the next token"):
        choose_token(torch.tensor([[logit, 0.0]]), 1.0, 0.9, None)


def test_a_row_is_the_same_whichever_rows_are_told_beside_it() -> None:
    model, prompt = SomeLM(BASE).double(), PROMPT[:1]
    options = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3}

    def tell(*seeds: int) -> torch.Tensor:
        rows = generate_tokens(model, prompt.expand(len(seeds), -1), 12, seeds=seeds, **options)
        return torch.stack(list(rows), dim=1)

    together = tell(5, 6, 7)
    assert not torch.equal(together[0], together[1])
    for row, seed in enumerate((5, 6, 7)):
        assert torch.equal(tell(seed)[0], together[row])


def test_noise_of_a_seed_is_exponential_and_new_at_every_step() -> None:
    choose = Chooser(Sampling(temperature=1.0), (3, 50_000), torch.device("cpu"), seeds=[1, 2, 2**61])
    first = choose.draw_noise()
    choose(torch.zeros(3, 50_000), PROMPT)
    later = choose.draw_noise()
    for noise in (first, later):
        assert bool((noise > 0).all())
        assert noise.mean(1) == pytest.approx(torch.ones(3).numpy(), abs=0.03)
        assert noise.var(1) == pytest.approx(torch.ones(3).numpy(), abs=0.06)
    parts = torch.cat((first, later)).flatten(0, 0)
    assert torch.corrcoef(parts).fill_diagonal_(0).abs().max() < 0.03


def test_texts_told_side_by_side_come_as_they_do_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [b"Anna ran. THE END. More", "é".encode() + b"\x02 nothing behind the end"]

    def tell(*_: object, **__: object) -> Iterator[torch.Tensor]:
        yield from (torch.tensor(pair) for pair in zip(*(text.ljust(25) for text in told), strict=True))

    monkeypatch.setattr(generation, "generate_tokens", tell)
    monkeypatch.setattr(generation, "EOS", 2)
    letters = cast("Tokenizer", Letters())
    pieces = list(generation.stream_texts(SomeLM(BASE), letters, "", 99, seeds=[0, 1], stop=["THE END"]))
    texts = ["".join(piece for number, piece in pieces if number == row) for row in (0, 1)]
    assert texts == ["Anna ran. ", "é"]
