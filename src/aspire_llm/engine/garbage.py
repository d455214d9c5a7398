"""Python's collector of garbage, kept from stopping everything while requests run.

A full collection looks through the objects of torch and transformers too, which takes 0.3 s: as long as a hundred steps of a
small model. Hardly any of them is garbage.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects before the youngest are looked through: a step of 256 requests makes about a thousand, which hardly ever are garbage.
YOUNG = 10_000
RARELY = 100  # collections of younger objects before one of all


def keep_collections_short() -> None:
    """For the rest of a process that serves: call it when the model is loaded. What is there now stays, and is not looked
    through again; what comes later is looked through in full when asked for, or after RARELY collections of younger objects."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extensions that look for leaks at the end take what is kept for one
    _collect_all_rarely()


@contextmanager
def rare_collections() -> Iterator[None]:
    """While it lasts, full collections come only after RARELY of younger objects."""
    before = gc.get_threshold()
    _collect_all_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _collect_all_rarely() -> None:
    _, middle, _ = gc.get_threshold()
    gc.set_threshold(YOUNG, middle, RARELY)
