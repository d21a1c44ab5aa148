"""The compiled inner loops of the CPU path: built at first use, bound through ctypes.

Where there is no C compiler, or its output does not load, `load` says so once in the log and `host` goes on in torch,
slower; `SGLANG_PIC_HOST=torch` switches the loops off.

The library is linked against no OpenMP: the symbols resolve to the one that torch has loaded, so that both share their
threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path
from typing import Final

import torch
from pic_native import BuildError, build
from torch import Tensor

from .layers import LayerBuffers, Source
from .rope_params import RopeParams

logger = logging.getLogger(__name__)

_SWITCH: Final = "SGLANG_PIC_HOST"
_SOURCE: Final = Path(__file__).with_suffix(".c")
# NOTE: `-ffp-contract=off`: which product of a rotation is rounded is written in the source, not a compiler's choice.
_OPTIONS: Final = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")

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
            *(_POINTER, _POINTER, _POINTER, _POINTER, _INT64, _INT64),
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
        source: Source | None = None,
    ) -> None:
        """See `dispatch.move_rows`.

        Raises:
            MemoryError: no memory for the angles; nothing has been written.
        """
        _, heads, dim = turned[0].shape
        src, dst, shifts = src.contiguous(), dst.contiguous(), shifts.contiguous()
        inv_freq = rope.inv_freq.to(torch.float64).contiguous()
        source = source or Source(turned, copied)
        done = self._splice(
            *(None if each is None else each.addresses.data_ptr() for each in (source.copied, copied)),
            *(source.turned.addresses.data_ptr(), turned.addresses.data_ptr()),
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
        library = build(_SOURCE, ctypes.CDLL, options=_OPTIONS, libraries=("-lm",), key=torch.__version__)
    except BuildError as error:
        logger.warning("CPU splices run in torch, slower: %s", error)
        return None
    return NativeRows(library)
