"""What all tests share: tests that need a GPU or a browser are skipped with a sentence where there is none."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Small tensors: more threads would only wait for each other, above all with several test processes.
torch.set_num_threads(1)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


# WebGL without a graphics card; nothing of the browser's own calls home.
BROWSER = ("--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
           "--disable-background-networking", "--disable-component-update", "--disable-sync",
           "--no-first-run")  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One for all tests of a process: playwright cannot be started twice in one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with playwright.sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=CHROMIUM, args=list(BROWSER))
        yield opened
        opened.close()


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
