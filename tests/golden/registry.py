"""Every registered experiment as `some experiments show NAME --json` prints it, kept in registry.json.

python tests/golden/registry.py --renew    writes it anew: see "How to renew goldens" in CONTRIBUTING.md

Configs are kept as differences from the defaults, and the defaults once: a field that comes later changes nothing here
as long as it stands at its default.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from some_moe.cli import main
from some_moe.config import RunConfig

HERE = Path(__file__).parent


def ask(*words: str) -> Any:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main([*words, "--json"]) == 0
    return json.loads(said.getvalue())


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def read_defaults() -> dict[str, Any]:
    return flatten(RunConfig().model_dump(mode="json"))


def read_experiments(defaults: dict[str, Any]) -> dict[str, Any]:
    """{name: all that is said about it}."""
    found = {}
    for entry in ask("experiments", "list"):
        record = ask("experiments", "show", entry["name"])
        config = flatten(record["config"])
        record["config"] = {name: value for name, value in config.items() if value != defaults[name]}
        found[entry["name"]] = record
    return found


if __name__ == "__main__":
    defaults = read_defaults()
    text = json.dumps({"defaults": defaults, "experiments": read_experiments(defaults)}, indent=1, ensure_ascii=False)
    if "--renew" in sys.argv:
        (HERE / "registry.json").write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
