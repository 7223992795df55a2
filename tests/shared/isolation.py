"""A process of its own, for what other tests of this one must not disturb: how often torch compiles, say."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function, at the top of its module, returns when it is called in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
