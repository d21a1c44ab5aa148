"""The compiled inner loops of the CPU path: built at first use, bound through ctypes.

Where there is no C compiler, or its output does not load, `load` says so once in the log and `host` goes on in torch,
slower; `SGLANG_PIC_HOST=torch` switches the loops off.

The library is compiled from `host_native.c` for this very CPU and kept where Python keeps this package's compiled
files, named by a hash of source, command, CPU and torch version. It is linked against no OpenMP: the symbols resolve to
the one that torch has loaded, so that both share their threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from .layers import LayerBuffers
from .rope_params import RopeParams

logger = logging.getLogger(__name__)

_SWITCH: Final = "SGLANG_PIC_HOST"
_SOURCE: Final = Path(__file__).with_suffix(".c")
# NOTE: `-ffp-contract=off`: which product of a rotation is rounded is written in the source, not a compiler's choice.
_COMPILE: Final = (
    *("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-fPIC", "-c"),
)
_TIMEOUT_S: Final = 60

# `enum kind` of the source.
_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def load() -> NativeRows | None:
    """The compiled loops, or `None` where they are switched off or cannot be compiled.

    The first call compiles, in a second or two; its outcome is kept for the process.

    Raises:
        ValueError: the environment variable `SGLANG_PIC_HOST` is neither `auto` nor `torch`.
    """
    chosen = os.environ.get(_SWITCH, "auto")
    if chosen == "torch":
        return None
    if chosen != "auto":
        raise ValueError(f"{_SWITCH}={chosen!r}: must be 'auto' or 'torch'; unset it for auto.")
    return _load()


class NativeRows:
    """Row moves over the buffers of a pool, with operands that were checked and on torch's threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Bind a library that was compiled from `host_native.c`."""
        self._splice = library.pic_splice
        self._splice.argtypes = (
            *(_POINTER, _POINTER, _INT64, _INT64),
            *(_INT64, _INT64, _INT64, _INT64, _INT, _INT, _POINTER),
            *(_POINTER, _POINTER, _POINTER, _INT, _INT64, _INT),
        )
        self._splice.restype = _INT
        self._slots_hold = library.pic_slots_hold
        self._slots_hold.argtypes = (_POINTER, _POINTER, _INT64, _INT64)
        self._slots_hold.restype = _INT

    def slots_hold(self, src: Tensor, dst: Tensor, num_slots: int) -> bool:
        """Whether every slot is in `[0, num_slots)`, none twice in `dst` and none in both: O(n) and a bit per slot.

        Args:
            src: `[n]` int64 in CPU memory.
            dst: likewise.
            num_slots: slots of the pool.
        """
        src, dst = src.contiguous(), dst.contiguous()
        return bool(self._slots_hold(src.data_ptr(), dst.data_ptr(), src.numel(), num_slots))

    def move_rows(
        self,
        turned: LayerBuffers,
        copied: LayerBuffers | None,
        src: Tensor,
        dst: Tensor,
        shifts: Tensor,
        rope: RopeParams,
        offset: int,
    ) -> None:
        """See `dispatch.move_rows`.

        Raises:
            MemoryError: no memory for the angles; nothing has been written.
        """
        _, heads, dim = turned[0].shape
        src, dst, shifts = src.contiguous(), dst.contiguous(), shifts.contiguous()
        inv_freq = rope.inv_freq.to(torch.float64).contiguous()
        done = self._splice(
            None if copied is None else copied.addresses.data_ptr(),
            turned.addresses.data_ptr(),
            len(turned),
            0 if copied is None else copied.row_bytes,
            *(heads, dim, offset, rope.rotary_dim // 2),
            *(not rope.is_neox_style, _KINDS[turned.dtype], inv_freq.data_ptr()),
            *(src.data_ptr(), dst.data_ptr(), shifts.data_ptr(), shifts.element_size()),
            *(src.numel(), torch.get_num_threads()),
        )
        if not done:
            raise MemoryError(f"no memory for the angles of {src.numel()} tokens.")


@functools.cache
def _load() -> NativeRows | None:
    try:
        library = _build()
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning("CPU splices run in torch, slower: %s", detail[0] if detail else type(error).__name__)
        return None
    return NativeRows(library)


def _build() -> ctypes.CDLL:
    """The library, from the cache or freshly compiled."""
    compiler = _compiler()
    command = [*compiler, *_COMPILE]
    parts = [_SOURCE.read_text(encoding="utf8"), *command, platform.machine(), _cpu_features(), torch.__version__]
    name = f"{_SOURCE.stem}.{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    kept = Path(cache_from_source(str(_SOURCE.with_suffix(".py")))).with_name(name)
    if kept.is_file():
        return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(prefix="pic_kernels-") as folder:
        objects, built = Path(folder, "rows.o"), Path(folder, name)
        steps: tuple[list[str | Path], ...] = (
            [*command, _SOURCE, "-o", objects],
            [*compiler, "-shared", objects, "-o", built, "-lm"],
        )
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        library = ctypes.CDLL(str(built))
        _keep(built, kept)
    return library


def _compiler() -> list[str]:
    """The command of a C compiler: what `CC` says, else the system's.

    Raises:
        FileNotFoundError: there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    found = next(filter(None, map(shutil.which, named[:1] or ("cc", "gcc", "clang"))), None)
    if found is None:
        raise FileNotFoundError(f"no C compiler ({named[0] if named else 'cc, gcc, clang'}); install gcc or set CC")
    return [found, *named[1:]]


def _keep(built: Path, kept: Path) -> None:
    """Put a library that loads where the next process finds it; a folder that cannot be written to costs a second."""
    beside = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(built, beside)
        # NOTE: ranks of one server compile at the same time; whoever is last replaces an equal file.
        beside.replace(kept)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        logger.debug("%s is not kept: %s", kept, error)


def _cpu_features() -> str:
    """What tells this CPU from others that may see the same folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
