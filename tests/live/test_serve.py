"""`some serve` as OpenAI's own client meets it: whole and streamed, with refusals as its exceptions."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import some_moe
from some_moe.live import answers
from some_moe.live.server import make_api
from tests.live.folders import Served, serving

openai = pytest.importorskip("openai", reason="needs the package openai")
pytest.importorskip("starlette", reason="needs the extra live")
KEY = "a-key"


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[Served]:
    with serving(lambda port: make_api(run, host="127.0.0.1", port=port, token=KEY)) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0) as found:
        yield found


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list().data] == ["tiny"]


def test_a_completion_is_what_the_run_writes(client: Any, run: Path) -> None:
    asked = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.95, "seed": 3}
    found = client.completions.create(model="tiny", prompt="Once", **asked)
    choice = found.choices[0]
    assert choice.text == "".join(some_moe.load(run).generate("Once", 12, seed=3))
    assert choice.finish_reason == "length"
    assert found.usage.completion_tokens == 12
    assert found.usage.total_tokens == found.usage.prompt_tokens + 12


def test_streamed_pieces_make_the_same_text(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "Once", "max_tokens": 12, "seed": 3}
    whole = client.completions.create(**asked)
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert len(chunks) > 3
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage


def test_the_likeliest_text_is_always_the_same(client: Any) -> None:
    texts = {client.completions.create(model="tiny", prompt="The", temperature=0).choices[0].text for _ in range(2)}
    assert len(texts) == 1


def test_stops_echo_several_prompts_and_several_texts(client: Any) -> None:
    asked = {"model": "tiny", "max_tokens": 10, "seed": 1}
    long = client.completions.create(prompt="Once", **asked).choices[0].text
    word = long[len(long) // 2 :][:3]
    short = client.completions.create(prompt="Once", stop=[word], **asked).choices[0]
    assert short.text == long[: long.index(word)]
    assert short.finish_reason == "stop"
    assert client.completions.create(prompt="Once", echo=True, **asked).choices[0].text == "Once" + long
    several = client.completions.create(prompt=["Once", "The"], n=2, **asked).choices
    assert [choice.index for choice in several] == [0, 1, 2, 3]
    assert several[0].text == long
    assert several[0].text != several[1].text


def test_a_prompt_may_be_tokens(client: Any, run: Path) -> None:
    ids = some_moe.load(run).tokenizer.encode("Once upon")
    asked = {"model": "tiny", "max_tokens": 6, "seed": 2}
    texts = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in ("Once upon", ids, [ids])]
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"temperature": 11}, "temperature 11"),
        ({"temperature": -1}, "temperature -1"),
        ({"top_p": 0}, "top_p 0"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"max_tokens": 10**7}, "max_tokens"),
        ({"n": 99}, "n 99"),
        ({"logprobs": 3}, "logprobs is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
        ({"stop": ["a"] * 20}, "stop"),
        ({"prompt": [10**6]}, "beyond the vocabulary"),
        ({"extra_body": {"repetition_penalty": 99}}, "repetition_penalty"),
        ({"extra_body": {"seed": "x"}}, "seed"),
    ],
)
def test_what_cannot_be_done_is_a_bad_request_with_a_sentence(client: Any, asked: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.completions.create(**({"model": "tiny", "prompt": "a"} | asked))


def test_other_models_keys_and_conversations_are_refused(client: Any, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.NotFoundError, match="/v1/completions"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    with (
        openai.OpenAI(base_url=f"{served.address}/v1", api_key="another", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_nan_and_other_sites_are_refused(served: Served) -> None:
    headers = {"x_some_token": None, "authorization": f"Bearer {KEY}"}
    assert served.ask("/v1/completions", raw=b'{"prompt": "a", "temperature": NaN}', **headers)[0] == 400
    assert served.ask("/v1/completions", raw=b"[]", **headers)[0] == 400
    assert served.ask("/v1/completions", {"prompt": "a"}, origin="http://evil.example", **headers)[0] == 403
    assert served.ask("/v1/completions", {"prompt": "a"}, host="evil.example:80", **headers)[0] == 403
    assert served.ask("/v1/completions", {"prompt": "a"}, x_some_token=None)[0] == 401


def test_requests_at_the_same_time_wait_for_their_turn(client: Any) -> None:
    def ask(seed: int) -> str:
        return str(client.completions.create(model="tiny", prompt="Once", max_tokens=20, seed=seed).choices[0].text)

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone


def test_who_would_wait_too_long_or_behind_too_many_is_told_to_come_again(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = client.completions.create(model="tiny", prompt="Once", max_tokens=2000, temperature=0, stream=True)
    next(iter(stream))
    for name, value in (("WAIT_SECONDS", 0.0), ("MOST_WAITING", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(answers, name, value)
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="tiny", prompt="a")
    stream.close()
    client.completions.create(model="tiny", prompt="a", max_tokens=1)  # whoever leaves, gives the place free


def test_whoever_leaves_at_any_moment_leaves_nothing_behind(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(lambda port: make_api(run, host="127.0.0.1", port=port, token=None)) as served:
        for moment in range(24):
            asked = {"prompt": "Once", "max_tokens": 4000, "temperature": 2, "stream": moment % 2 == 0}
            served.leave("/v1/completions", asked, moment / 500)
        begin = time.monotonic()
        assert served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert time.monotonic() - begin < 20  # the texts of those who left are not written to their ends
    assert caplog.records == []
