"""Finds the compiled twin of an inner loop: `loops.c` is compiled at first use, and Python does the same without it."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar, cast

from pic_native import BuildError, load_module

logger = logging.getLogger(__name__)

_SWITCH: Final = "SGLANG_PIC_LOOPS"
_SOURCE: Final = Path(__file__).with_name("loops.c")

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Have calls of `function`, all by position, go to the function of its name in `loops.c`.

    `function` is what both compute: it serves where there is no compiler, and the tests compare the two.
    """
    chosen: Callable[..., T] | None = None

    # Without **kwargs a call costs half as much.
    @functools.wraps(function)
    def call(*args: Any) -> T:
        nonlocal chosen
        if chosen is None:
            loops = load()
            chosen = function if loops is None else getattr(loops, function.__name__)
        return chosen(*args)  # type: ignore[call-arg]

    return cast("Callable[P, T]", call)


def load() -> ModuleType | None:
    """The compiled loops, or `None` where they are switched off or cannot be compiled.

    The first call may compile, in a second or two; its outcome is kept for the process.

    Raises:
        ValueError: the environment variable `SGLANG_PIC_LOOPS` is neither `auto` nor `python`.
    """
    chosen = os.environ.get(_SWITCH, "auto")
    if chosen == "python":
        return None
    if chosen != "auto":
        raise ValueError(f"{_SWITCH}={chosen!r}: must be 'auto' or 'python'; unset it for auto.")
    return _load()


@functools.cache
def _load() -> ModuleType | None:
    try:
        return load_module("loops", _SOURCE)
    except BuildError as error:
        logger.warning("Plans are made in Python, several times slower: %s", error)
        return None
