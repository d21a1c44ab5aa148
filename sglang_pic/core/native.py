"""Compiles the inner loops of plans with numba; without numba the same functions run as Python."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeVar, cast

logger = logging.getLogger(__name__)

_SWITCH: Final = "SGLANG_PIC_LOOPS"

F = TypeVar("F", bound=Callable[..., Any])

PLAIN: Final[dict[str, FunctionType]] = {}
"""The uncompiled loops by name, in the order of their definition: a loop may call those before it."""
_parameters: dict[str, str] = {}


def loop(parameters: str = "") -> Callable[[F], F]:
    """Mark a function for `load_loops`; call it as an attribute of its module, with positional arguments.

    Args:
        parameters: the types of its parameters, a letter each: an array of int32 (`t`), int64 (`q`), uint32 (`u`) or
            uint8 (`b`), which may be read-only; an array of int32 that is written to (`w`); an integer (`i`); the
            arrays of a `Book` (`B`) or of `Asked` (`A`). Empty for a function that only other loops call.
    """

    def mark(function: F) -> F:
        name, plain = function.__name__, cast(FunctionType, function)
        PLAIN[name], _parameters[name] = plain, parameters

        @functools.wraps(function)
        def first_call(*args: Any) -> Any:
            load_loops()
            return plain.__globals__[name](*args)

        return cast(F, first_call)

    return mark


@functools.cache
def load_loops() -> bool:
    """Compile all loops, or load them from numba's cache; False if they run as Python.

    A server calls this at start-up, so that no request waits; elsewhere the first call of a loop does. numba's cache is
    in `NUMBA_CACHE_DIR`, else in `__pycache__` beside the loops or, if that is read-only, in the user's cache folder.
    Processes that share it compile each loop once.

    Raises:
        ValueError: the environment variable `SGLANG_PIC_LOOPS` is neither `auto` nor `python`.
    """
    started, chosen = time.perf_counter(), os.environ.get(_SWITCH, "auto")
    if chosen not in ("auto", "python"):
        raise ValueError(f"{_SWITCH}={chosen!r}: must be 'auto' or 'python'; unset it for auto.")
    if chosen == "auto":
        try:
            compiler = _compiler()
            for name, plain in PLAIN.items():
                plain.__globals__[name] = compiler(plain, _parameters[name])
            logger.info("sglang_pic: the inner loops of plans are ready after %.1f s", time.perf_counter() - started)
            return True
        except Exception as error:  # numba is missing, or is one that does not compile them
            logger.warning("sglang_pic: plans are made in Python, many times slower, without numba: %s", error)
    for name, plain in PLAIN.items():
        plain.__globals__[name] = plain
    return False


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from what they do with the same file; the system frees it if this one ends.

    Ranks start together: one compiles a loop, the others find it in numba's cache. Without locks each compiles.
    """
    with ExitStack() as stack:
        try:
            # Not on every system; census and explain import this module, too.
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            logger.debug("sglang_pic: processes compile loops side by side: %s", error)
        yield


def _compiler() -> Callable[[FunctionType, str], Callable[..., Any]]:
    """A compiler of functions whose parameters have the types that the letters name.

    Raises:
        ImportError: there is no numba.
    """
    from numba import njit, types

    arrays = {"t": types.int32, "q": types.int64, "u": types.uint32, "b": types.uint8}
    letters = {letter: types.Array(dtype, 1, "C", readonly=True) for letter, dtype in arrays.items()}

    def tuple_of(parts: str) -> Any:
        return types.Tuple([letters[part] for part in parts])

    letters |= {"w": types.int32[::1], "i": types.int64, "B": tuple_of("bttbttttb"), "A": tuple_of("ttbbbttt")}

    def compile_loop(plain: FunctionType, parameters: str) -> Callable[..., Any]:
        if not parameters:
            return njit(error_model="numpy", inline="always")(plain)
        signature = tuple(letters[letter] for letter in parameters)
        try:
            folder = njit(error_model="numpy", cache=True)(plain).stats.cache_path
            assert folder is not None, "it has a cache"
            with _alone(Path(folder, f"{plain.__name__}.lock")):
                return njit(signature, error_model="numpy", cache=True)(plain)
        except RuntimeError as error:
            logger.warning(
                "sglang_pic: each start compiles for seconds (%s); set NUMBA_CACHE_DIR to a folder that keeps it.",
                error,
            )
            return njit(signature, error_model="numpy")(plain)

    return compile_loop
