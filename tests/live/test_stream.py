"""The event stream: what is there, then what comes, within two seconds, through every accident of a log."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.folders import Served, append, evaluation_line, make_run, share, step_line, watching, write_keys

pytest.importorskip("starlette", reason="needs the extra live")
SOON = 2.0  # seconds within which a page must know


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "run")


@pytest.fixture
def served(path: Path) -> Iterator[Served]:
    with watching(path.parent) as found:
        yield found


def wait(events: Iterator[tuple[str, Any]], name: str) -> Any:
    """The next event of a name, which must come soon."""
    begin = time.monotonic()
    for found, data in events:
        assert time.monotonic() - begin < share(SOON), f"{name} came too late"
        if found == name:
            return data
    raise AssertionError


def steps_of(data: Any) -> list[int]:
    return [row[0] for row in data["rows"]["steps"]]


def test_what_is_there_comes_first_and_then_what_is_written(served: Served, path: Path) -> None:
    events = served.events("/events?run=0")
    assert wait(events, "hello")["step"][0] == "step"
    assert wait(events, "runs")[0]["step"] == 20
    assert steps_of(wait(events, "metrics")) == list(range(1, 21))
    append(path, "metrics.jsonl", step_line(21))
    assert steps_of(wait(events, "metrics")) == [21]
    append(path, "metrics.jsonl", evaluation_line(21, 2, 3.0))
    assert wait(events, "metrics")["rows"]["evaluations"][0][2] == 3.0
    append(path, "samples.jsonl", json.dumps({"step": 21, "text": "Once <b>upon</b>"}) + "\n")
    assert wait(events, "samples")["rows"] == [{"step": 21, "text": "Once <b>upon</b>"}]
    write_keys(path, 30, 2, 6, 8)
    assert wait(events, "runs")[0]["snapshots"] == [0, 10, 20, 30]


def test_half_a_line_waits(served: Served, path: Path) -> None:
    events = served.events("/events?run=0")
    wait(events, "metrics")
    line = step_line(21)
    append(path, "metrics.jsonl", line[:30])
    append(path, "samples.jsonl", json.dumps({"step": 21, "text": "a"}) + "\n")
    for name, _ in events:  # whoever told of the sample has seen the half line before
        assert name != "metrics"
        if name == "samples":
            break
    append(path, "metrics.jsonl", line[30:])
    assert steps_of(wait(events, "metrics")) == [21]


def test_a_page_that_comes_back_goes_on_where_it_was(served: Served, path: Path) -> None:
    place = wait(served.events("/events?run=0"), "metrics")["place"]
    append(path, "metrics.jsonl", step_line(21) + step_line(22))
    assert steps_of(wait(served.events(f"/events?run=0&metrics={place}"), "metrics")) == [21, 22]
    assert steps_of(wait(served.events("/events?run=0"), "metrics")) == list(range(1, 23))


def test_a_log_that_is_cut_back_makes_the_page_begin_again(served: Served, path: Path) -> None:
    events = served.events("/events?run=0")
    wait(events, "metrics")
    (path / "metrics.jsonl").write_text("".join(map(step_line, range(1, 6))), encoding="utf-8")
    assert wait(events, "again")["log"] == "metrics"
    assert steps_of(wait(events, "metrics")) == [1, 2, 3, 4, 5]


def test_a_run_that_ends_or_vanishes_is_told(served: Served, path: Path) -> None:
    events = served.events("/events?run=0")
    wait(events, "metrics")
    (path / "result.json").write_text(json.dumps({"status": "finished", "steps": 20}), encoding="utf-8")
    assert wait(events, "runs")[0]["state"] == "finished"
    shutil.rmtree(path)
    assert wait(events, "runs")[0]["state"] == "gone"
    make_run(path.parent / "next")
    assert wait(events, "runs")[0]["folder"].endswith("next")


def test_many_pages_share_what_was_read(served: Served, path: Path) -> None:
    pages = [served.events("/events?run=0") for _ in range(20)]
    for events in pages:
        assert steps_of(wait(events, "metrics")) == list(range(1, 21))
    append(path, "metrics.jsonl", step_line(21))
    for events in pages:
        assert steps_of(wait(events, "metrics")) == [21]


def test_a_queue_is_told_as_it_goes_on(served: Served, path: Path) -> None:
    events = served.events("/events")
    wait(events, "queues")
    job = {"name": "run", "state": "running", "reason": ""}
    (path.parent / "queue.json").write_text(json.dumps({"jobs": [job]}), encoding="utf-8")
    assert wait(events, "queues")[0]["jobs"] == [job]


def test_settings_tell_what_differs_from_another_run(served: Served, path: Path) -> None:
    make_run(path.parent / "other", **{"train.learning_rate": 0.5})
    begin = time.monotonic()
    while len(served.ask("/runs")[1]["runs"]) < 2:
        assert time.monotonic() - begin < share(SOON)
    found = served.ask("/runs/0/settings?against=1")[1]
    differing = {name for name, own, other in found["rows"] if own != other}
    assert differing == {"train.learning_rate"}
    assert not served.ask("/runs/0/settings")[1]["compared"]
