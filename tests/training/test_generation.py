"""Generated text: the cache changes nothing, seeds repeat, and the settings do what they say."""

import pytest
import torch

from some_moe import SomeLM
from some_moe.model.tokens import TokenInfo
from some_moe.training.generation import choose_token, generate_tokens
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
