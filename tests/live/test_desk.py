"""Asking the model: paths, experts forbidden and forced, guilds, text with its experts, one question at a time."""

import http.client
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import some_moe
from some_moe.glass.inspect.traces import trace
from some_moe.system.reading import clean
from tests.live.folders import TOKEN, Served, make_run, watching

pytest.importorskip("starlette", reason="needs the extra live")
TEXT = "Once upon a time there was a cat."


@pytest.fixture(scope="module")
def served(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with watching(run, make_run(tmp_path_factory.mktemp("bare") / "bare")) as found:
        yield found


def read(served: Served, **more: Any) -> Any:
    status, found = served.ask("/runs/0/trace", {"text": TEXT} | more)
    assert status == 200, found
    return found


def nats(traced: Any) -> list[float]:
    return [token["next_nats"] for token in traced["tokens"][:-1]]


def test_a_trace_is_the_one_that_python_gives(served: Served, run: Path) -> None:
    found = read(served)
    assert found["trace"] == json.loads(json.dumps(trace(some_moe.load(run), TEXT).to_dict()))
    assert found["altered"] is None
    bits = sum(nats(found["trace"])) / math.log(2) / len(TEXT)
    assert found["bits_per_byte"] == pytest.approx(bits)


def test_a_forbidden_expert_works_for_nobody_and_losses_change(served: Served) -> None:
    own = read(served)["trace"]
    expert = own["tokens"][3]["experts"][1][0]
    found = read(served, forbid=[[1, expert]])
    assert found["trace"] == own  # nothing of it is left behind
    altered = found["altered"]["tokens"]
    assert all(expert not in token["experts"][1] for token in altered)
    assert [t["experts"][0] for t in altered] == [t["experts"][0] for t in own["tokens"]]
    assert nats(found["altered"]) != nats(own)
    assert read(served)["trace"] == own


def test_a_forced_expert_works_for_everybody(served: Served) -> None:
    own = read(served)["trace"]
    rare = next(e for e in range(6) if not all(e in token["experts"][0] for token in own["tokens"]))
    altered = read(served, force=[[0, rare]])["altered"]["tokens"]
    assert all(rare in token["experts"][0] for token in altered)


def test_a_forced_guild_does_all_the_work_of_its_layer(served: Served) -> None:
    guild = {1, 3, 4}
    altered = read(served, force=[[1, expert] for expert in guild])["altered"]["tokens"]
    assert all(set(token["experts"][1]) <= guild for token in altered)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"forbid": [[0, e] for e in range(5)]}, "a token needs 2"),
        ({"forbid": [[0, 6]]}, "experts 0 to 5"),
        ({"forbid": [[1, 3]], "force": [[1, 3], [1, 4]]}, "forbidden and forced"),
        ({"force": [[2, 0]]}, "layers 0 to 1"),
        ({"text": " "}, "empty"),
        ({"text": "cat " * 500}, "give a shorter text"),
        ({"checkpoint": "step-999"}, "no checkpoint"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(served: Served, body: Any, words: str) -> None:
    status, found = served.ask("/runs/0/trace", {"text": TEXT} | body)
    assert status == 400
    assert words in found["error"]["message"]


def test_a_run_without_a_checkpoint_says_so(served: Served) -> None:
    for path, body in (("trace", {"text": "a"}), ("generate", {"prompt": "a"}), ("look", {})):
        status, found = served.ask(f"/runs/1/{path}", body)
        assert status == 400
        assert "no checkpoint" in found["error"]["message"]


def test_checkpoints_can_be_compared(served: Served) -> None:
    steps = served.ask("/runs")[1]["runs"][0]["checkpoints"]
    assert len(steps) > 1
    traces = [read(served, checkpoint=f"step-{step}")["trace"] for step in steps[:2]]
    assert [one["step"] for one in traces] == steps[:2]
    assert nats(traces[0]) != nats(traces[1])


def write(served: Served, **more: Any) -> list[Any]:
    status, found = served.ask("/runs/0/generate", {"prompt": "Once", "max_tokens": 12, "seed": 3} | more)
    assert status == 200, found
    return [json.loads(line) for line in found.decode().splitlines()]


def test_text_comes_with_the_experts_of_every_token(served: Served, run: Path) -> None:
    first, *pieces = write(served)
    assert first["seed"] == 3
    text = "".join(piece["text"] for piece in pieces)
    assert text == clean("".join(some_moe.load(run).generate("Once", 12, seed=3)))
    ways = [way for piece in pieces for way in piece["experts"]]
    assert len(ways) <= 12
    assert all(len(way) == 2 and all(len(experts) == 2 and max(experts) < 6 for experts in way) for way in ways)


def test_one_text_at_a_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("some_moe.live.desk.PATIENCE_SECONDS", 0.0)
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    body = json.dumps({"prompt": "Once", "max_tokens": 1000, "temperature": 0})  # has no end of its own
    headers = {"x-some-token": TOKEN, "content-type": "application/json"}
    connection.request("POST", "/runs/0/generate", body, headers)
    answer = connection.getresponse()
    answer.readline()  # it has begun
    for path, asked in (("generate", {"prompt": "a"}), ("trace", {"text": "a"}), ("look", {})):
        status, found = served.ask(f"/runs/0/{path}", asked)
        assert status == 429
        assert "another question" in found["error"]["message"]
    connection.close()  # whoever leaves gives the place free
    answer.close()
    for _ in range(200):
        if served.ask("/runs/0/trace", {"text": "a"})[0] == 200:
            break
        threading.Event().wait(0.05)
    else:
        raise AssertionError("the desk was never given back")


def test_whoever_leaves_at_any_moment_leaves_nothing_behind(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for moment in range(24):
        served.leave("/runs/0/generate", {"prompt": "Once", "max_tokens": 300, "temperature": 2}, moment / 500)
    for _ in range(200):
        if served.ask("/runs/0/trace", {"text": "a"})[0] == 200:
            break
        threading.Event().wait(0.05)
    else:
        raise AssertionError("the desk was never given back")
    assert caplog.records == []


def test_what_is_refused_gives_the_desk_back(served: Served) -> None:
    assert served.ask("/runs/0/generate", {"prompt": "a", "checkpoint": "step-999"})[0] == 400
    assert served.ask("/runs/0/trace", {"text": "   "})[0] == 400
    read(served)


def test_experts_are_seen_at_work(served: Served) -> None:
    pytest.importorskip("networkx")
    assert served.ask("/runs/0/insight") == (200, None)
    status, found = served.ask("/runs/0/look", {})
    assert status == 200, found
    assert found["family"] == "part of speech"
    assert [len(kinds) for kinds in found["kinds"]] == [6, 6]
    assert [len(place) for place in found["communities"]] == [6, 6]
    assert served.ask("/runs/0/insight")[1] == found
    busiest = max(range(6), key=lambda e: served.ask(f"/runs/0/expert?layer=0&expert={e}")[1]["served"])
    card = served.ask(f"/runs/0/expert?layer=0&expert={busiest}")[1]
    assert card["words"]
    assert card["contexts"][0]["word"]
    assert card["neighbours"]
    assert card["load"]


def test_evaluations_tell_the_respawns_of_each_layer(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "val_loss" in line][-1]["layers"]
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))["layers"]
    assert [layer["respawns"] for layer in last] == [layer["respawns"] for layer in result]
    assert sum(layer["respawns"] for layer in last) > 0
