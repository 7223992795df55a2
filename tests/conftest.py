"""What all tests share: tests that need a GPU or a browser are skipped with a sentence where there is none."""

import shutil

import pytest
import torch

# Small tensors: more threads would only wait for each other, above all with several test processes.
torch.set_num_threads(1)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = {}
    if not torch.cuda.is_available():
        absent["gpu"] = "needs a CUDA GPU, and torch sees none"
    if CHROMIUM is None:
        absent["browser"] = "needs a Chromium browser, and none is installed"
    for item in items:
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
