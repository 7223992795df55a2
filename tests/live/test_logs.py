"""Logs as they grow: half-written lines wait, what was cut back begins again, nothing else is lost or told twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from some_moe.config import ConfigError
from some_moe.live.logs import PIECE, Place, pick_metrics, pick_samples, read_piece
from tests.live.folders import append, evaluation_line, step_line

LOG = "metrics.jsonl"


def steps_of(lines: list[bytes]) -> list[int]:
    return [row[0] for row in pick_metrics(lines)["steps"]]


def test_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    append(tmp_path, LOG, step_line(1) + step_line(2))
    first = read_piece(tmp_path, LOG, Place())
    assert steps_of(first.lines) == [1, 2]
    assert read_piece(tmp_path, LOG, first.place) == type(first)([], first.place)
    append(tmp_path, LOG, step_line(3))
    again = read_piece(tmp_path, LOG, Place.parse(str(first.place)))  # as a page sends it back
    assert steps_of(again.lines) == [3]
    assert not again.again


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    line = step_line(1)
    append(tmp_path, LOG, line[:20])
    first = read_piece(tmp_path, LOG, Place())
    assert first.lines == []
    append(tmp_path, LOG, line[20:-1])
    assert read_piece(tmp_path, LOG, first.place).lines == []
    append(tmp_path, LOG, "\n" + step_line(2)[:5])
    assert steps_of(read_piece(tmp_path, LOG, first.place).lines) == [1]


def test_a_log_that_was_cut_back_begins_again(tmp_path: Path) -> None:
    append(tmp_path, LOG, "".join(map(step_line, range(1, 9))))
    place = read_piece(tmp_path, LOG, Place()).place
    (tmp_path / LOG).write_text(step_line(1) + step_line(2), encoding="utf-8")
    piece = read_piece(tmp_path, LOG, place)
    assert piece.again
    assert steps_of(piece.lines) == [1, 2]


def test_a_log_that_was_cut_back_and_has_outgrown_its_past_begins_again(tmp_path: Path) -> None:
    append(tmp_path, LOG, "".join(map(step_line, range(1, 5))))
    place = read_piece(tmp_path, LOG, Place()).place
    other = "".join(step_line(step, loss=9.0) for step in range(1, 12))
    (tmp_path / LOG).write_text(other, encoding="utf-8")
    piece = read_piece(tmp_path, LOG, place)
    assert piece.again
    assert steps_of(piece.lines) == list(range(1, 12))


def test_a_copy_that_only_grew_goes_on(tmp_path: Path) -> None:
    """As when a run is fetched from another machine again and again."""
    append(tmp_path, LOG, step_line(1))
    place = read_piece(tmp_path, LOG, Place()).place
    whole = (tmp_path / LOG).read_text(encoding="utf-8") + step_line(2)
    (tmp_path / LOG).unlink()
    (tmp_path / LOG).write_text(whole, encoding="utf-8")
    piece = read_piece(tmp_path, LOG, place)
    assert not piece.again
    assert steps_of(piece.lines) == [2]


def test_a_log_that_vanished_loses_nobody_s_place(tmp_path: Path) -> None:
    append(tmp_path, LOG, step_line(1))
    place = read_piece(tmp_path, LOG, Place()).place
    (tmp_path / LOG).unlink()
    assert read_piece(tmp_path, LOG, place).place == place
    assert read_piece(tmp_path / "nowhere", LOG, place).place == place


def test_a_long_log_comes_in_pieces_of_whole_lines(tmp_path: Path) -> None:
    many = 2 * PIECE // len(step_line(10_000)) + 10
    append(tmp_path, LOG, "".join(step_line(step) for step in range(1, many)))
    place, found = Place(), []
    while True:
        piece = read_piece(tmp_path, LOG, place)
        if not piece.lines:
            break
        place, found = piece.place, found + steps_of(piece.lines)
    assert found == list(range(1, many))


def test_a_line_without_end_is_left_out(tmp_path: Path) -> None:
    append(tmp_path, LOG, "x" * (PIECE + 100) + "\n" + step_line(1))
    first = read_piece(tmp_path, LOG, Place())
    assert steps_of(first.lines) == []
    assert steps_of(read_piece(tmp_path, LOG, first.place).lines) == [1]


@pytest.mark.parametrize("text", ["", "-", "7", "x-y", "-1-2", "1-2-3", "9" * 40 + "-1", "１-２x"])
def test_a_place_that_is_none_is_the_beginning(text: str) -> None:
    assert Place.parse(text).byte in (0, 1)
    assert Place.parse(text) == Place() or text == "1-2-3"


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    import os

    (tmp_path / "run").mkdir()
    append(tmp_path, "secret", step_line(1))
    (tmp_path / "run" / LOG).symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="leads out"):
        read_piece(tmp_path / "run", LOG, Place())
    (tmp_path / "run" / LOG).unlink()
    os.mkfifo(tmp_path / "run" / LOG)
    with pytest.raises(ConfigError, match="pipe"):
        read_piece(tmp_path / "run", LOG, Place())


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"7", b'{"step": "1", "train_loss": 2}', b'{"train_loss": 2}', b'{"step": true, "train_loss": 1}',
     b'{"step": 1e400, "train_loss": 1}', b"[" * 100_000, b'{"step": 1.5, "train_loss": 2}', b"\xff\xfe"],
)  # fmt: skip
def test_lines_that_are_none_are_left_out(line: bytes) -> None:
    assert pick_metrics([line]) == {"steps": [], "evaluations": []}


def test_only_numbers_come_through() -> None:
    odd: dict[str, Any] = {
        "step": 3,
        "train_loss": "<b>",
        "gradient_norm": float("nan"),
        "tokens": 1e300,
        "top_k": True,
    }
    rows = pick_metrics([json.dumps(odd).encode()])["steps"]
    assert rows == [[3, None, None, None, None, None, None, None]]
    evaluation = json.dumps({"step": 3, "val_loss": float("inf"), "layers": ["x", {"gini": "y"}]}).encode()
    assert pick_metrics([evaluation])["evaluations"] == [[3, None, None, None, None, None, [[None] * 5]]]


def test_evaluations_keep_their_layers() -> None:
    (row,) = pick_metrics([evaluation_line(20, 2).encode()])["evaluations"]
    assert row == [20, 2000, 4.5, 90.0, 1.2, None, [[0.5, 2.0, 5, 2.0, 0], [0.5, 2.0, 5, 2.0, 1]]]


def test_samples_are_cleaned_and_cut() -> None:
    lines = [json.dumps({"step": 1, "text": "a\x1b[2Jb" + "x" * 9_000}).encode(), b'{"step": 2, "text": 7}']
    (sample,) = pick_samples(lines)
    assert sample["text"].startswith("a\ufffd[2Jb")
    assert len(sample["text"]) == 4_000
