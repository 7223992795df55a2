"""What a run's JSON holds: what fits is read, what does not is damage in one sentence, or a line that is left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from some_moe.errors import ConfigError
from some_moe.system.records import WHOLE_RESULT, cut_log, read_log, read_record

LAYER = {"layer": 0, "gini": 0.1, "entropy_bits": 2.0, "experts_used": 3, "num_experts": 4, "max_entropy_bits": 2}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"steps": "4"}, "steps must be a valid integer"),
        ({"steps": True}, "steps must be a valid integer"),
        ({"steps": -1}, "steps must be greater than or equal to 0"),
        ({"test_loss": [1]}, "test_loss must be a valid number"),
        ({"test_loss": 10**400}, "test_loss must be a valid number"),
        ({"layers": [LAYER, {"layer": 1}]}, "layers.1.gini is missing"),
        ({"layers": [LAYER], "middle_layer": 1}, "middle_layer 1 is none of its 1 layers"),
        ({"epochs": {"epoch": 1}}, "epochs must be a valid list"),
        ({"total_parameters": 0}, "total_parameters must be greater than or equal to 1"),
        ([], "it holds no JSON object"),
    ],
)
def test_a_result_of_other_types_is_damaged(tmp_path: Path, record: Any, words: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=rf"result.json' is damaged: {words}.*; restore it"):
        read_record(path)


def test_what_is_missing_unknown_or_null_is_allowed_unless_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    record = {"steps": 4, "test_loss": None, "new": {"in": "later versions"}, "layers": [LAYER], "middle_layer": 0}
    path.write_text(json.dumps(record))
    assert read_record(path) == record
    with pytest.raises(ConfigError, match=r"is damaged: name is missing; restore it"):
        read_record(path, needed=WHOLE_RESULT)


def test_lines_that_do_not_fit_are_left_out_and_kept_when_the_log_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    bad = [b'{"step": 2}', b'{"step": "2", "text": "a"}', b'{"step": 2, "text": "\xff"}', b"[" * 5000, b"NaN"]
    good = [b'{"step": 1, "text": "Once"}', b'{"step": 3, "text": "upon\\u001b[2J"}', b'{"step": 4, "text": "a time"}']
    path.write_bytes(b"\n".join([good[0], *bad, *good[1:]]) + b"\n")
    damaged: list[str] = []
    assert [record["text"] for record in read_log(path, damaged)] == ["Once", "upon\ufffd[2J", "a time"]
    assert damaged == ["samples.jsonl cannot be read at line 2, 3, 4, 5, 6: what stood there is left out."]
    cut_log(path, 3)
    assert path.read_bytes() == b"\n".join([good[0], *bad, good[1]]) + b"\n"


def test_a_log_that_need_not_be_cut_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "val_loss": null}\n')
    before = path.stat().st_mtime_ns
    cut_log(path, 1)
    assert path.stat().st_mtime_ns == before
