"""The notebooks of examples/ hold no outputs, and run from begin to end as they are."""

import json
import resource
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
MOST_SECONDS = 60  # of processor time: on a quiet machine that is its time, and on a busy one it stays the same
PATIENCE = 600  # of a machine that does other things too, for a cell


def test_there_are_three_and_they_hold_no_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["a_layer_of_your_own", "grow_and_merge", "look_inside_a_run"]
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
            assert not cell["metadata"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the notebook machinery, to its own authors
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_runs_and_shows_something(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # small tensors, see conftest.py
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # the kernel has ended
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(f"{path.stem}: {seconds:.1f} s")
    assert 1 < seconds < MOST_SECONDS
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    pages = [output for output in shown if "text/html" in output.get("data", {})]
    assert pages or any(output.output_type == "stream" for output in shown)
    if path.stem != "a_layer_of_your_own":
        assert len(pages) >= 4
