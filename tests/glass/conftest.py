"""One tiny run, trained and analysed once: all that the pages show, with a name that tries to be a script."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from some_moe.cli import main
from some_moe.glass.inspect.collection import Collection

NASTY = "<script>alert(1)</script>"
NAME = "<script>alert(1)<script>"  # of the run; a slash cannot be in it

GUILDS: dict[str, Any] = {
    "level": 0.01,
    "split": "valid",
    "num_tokens": 400,
    "labels": "Parts of speech are by the built-in tagger.",
    "families": [
        {
            "family": "part of speech",
            "classes": ["noun", "verb"],
            "layers": [
                {
                    "layer": 0, "mi_bits": 0.2, "mi_corrected_bits": 0.15, "nmi": 0.125, "p_value": 0.002,
                    "p_adjusted": 0.018,
                    "null_mean_bits": 0.05, "null_high_bits": 0.07, "random_keys_nmi": [0.08, 0.1],
                    "interval": [0.106, 0.132],
                }
            ],
        }
    ],
    "communities": [
        {"layer": 0, "modularity": 0.7, "null_mean": 0.01, "null_sd": 0.005, "p_value": 0.1, "groups": [[0, 1], [2]]}
    ],
    "depth": {"statement": "Fewer than three layers have no beginning, middle and end to compare.", "slopes": []},
    "swap": [{"layer": 0, "loss_change": 0.1177, "interval": [0.1012, 0.1352]}],
    "guilds": [
        {
            "name": "noun (part of speech), layer 0", "layer": 0, "family": "part of speech", "class": "noun",
            "experts": [1, 3], "npmi": 0.39, "q_value": 0.006, "p_association": 0.0005,
            "random_keys": {"p_adjusted": 0.002, "own_bits": 0.1294, "random_bits": [0.01, 0.03]},
            "words": [{"text": NASTY, "count": 12}], "contexts": [{"before": "the ", "word": NASTY, "after": " & co"}],
            "knockout": {
                "class_change": 0.2047, "other_change": 0.005, "random_class_change": 0.0061,
                "random_other_change": 0.0337, "effect": 0.2274, "p_value": 0.001, "p_adjusted": 0.002,
                "interval": [0.2, 0.25],
            },
            "verdict": "supported", "reason": "Its experts stand out.",
        },
        {
            "name": "verb (part of speech), layer 0", "layer": 0, "family": "part of speech", "class": "verb",
            "experts": [2], "npmi": 0.2, "q_value": 0.008, "words": [], "contexts": [], "knockout": None,
            "verdict": "not supported", "reason": "Random keys do about as well.",
        },
    ],
    "passed": {"enrichment": 2, "association": 2, "random_keys": 1, "knockout": 1},
    "control": None,
    "notes": ["Information is counted by selection."],
}  # fmt: skip


@pytest.fixture(scope="session")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the preset smoke, cut down, with its analysis. Nobody may write into it: see `run`."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    path = tmp_path_factory.mktemp("pages") / "run"
    train = ["train", "--preset", "smoke", "--name", NAME, "--out", str(path), "--model.num-experts", "6"]
    train += ["--data.train-subset-size", "32", "--data.val-subset-size", "6", "--train.epochs", "1"]
    assert main([*train, "--train.snapshot-every", "2"]) == 0
    assert main(["analyze", str(path), "--no-guilds", "--max-tokens", "400"]) == 0
    patch.undo()
    with (path / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 4, "text": f"Once {NASTY} upon a time.\nThe end."}) + "\n")
    seen = Collection.load(path / "analysis" / "collected.safetensors")
    (path / "analysis" / "guilds.json").write_text(json.dumps(GUILDS | {"of": seen.digest()}), encoding="utf-8")
    return path


@pytest.fixture
def run(analysed: Path, tmp_path: Path) -> Path:
    """A copy to write into."""
    path = tmp_path / "run"
    shutil.copytree(analysed, path)
    return path
