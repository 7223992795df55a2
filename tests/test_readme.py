"""The README's Python runs as it is printed."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_layers_example_runs_and_gravity_counts_its_tokens() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(code, names)
    assert int(names["layer"].state.total.sum()) == 3 * 8 * 32 * 2  # type: ignore[attr-defined]
