"""What all tests share: GPU tests are skipped with a sentence where there is no GPU."""

import sys
from pathlib import Path

import pytest
import torch

# Tests of one room share small models: tests/model/variants.py.
sys.path.insert(0, str(Path(__file__).parent / "model"))


# Small tensors: more threads would only wait for each other, above all with several test processes.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none"))
