"""The buffers of a pool's layers as one operand: checked once, with a table of their addresses.

The table lets one launch reach every layer. The object that holds the buffers holds the table too, so that it cannot
outlive the memory it points to, and no call has to look it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .operands import check_buffers


class LayerBuffers(tuple[Tensor, ...]):
    """One buffer `[num_slots, heads, dim]` per layer, alike and contiguous; immutable, checked when it is made.

    The ops take any sequence of tensors. A caller that makes a `LayerBuffers` of them once spares every call the
    checks and, on a device, building the table.
    """

    def __new__(cls, buffers: Sequence[Tensor], *, name: str = "buffers") -> LayerBuffers:
        """Check `buffers`, called `name` in messages.

        Raises:
            TypeError: a dtype whose rows cannot be rotated.
            ValueError: no buffer, one that is not contiguous, or buffers that differ.
        """
        check_buffers(name, buffers)
        # Aliases: `set_` on the caller's tensors leaves them where they are.
        return super().__new__(cls, (buffer.detach() for buffer in buffers))

    @classmethod
    def of(cls, name: str, buffers: Sequence[Tensor]) -> LayerBuffers:
        """`buffers` itself if they are a `LayerBuffers` already."""
        return buffers if isinstance(buffers, LayerBuffers) else cls(buffers, name=name)

    @property
    def dtype(self) -> torch.dtype:
        """The rows' dtype."""
        return self[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self[0].device

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one slot in one layer."""
        return self[0].stride(0) * self[0].element_size()

    @cached_property
    def is_aligned(self) -> bool:
        """Whether every row of every layer starts at a multiple of 16 bytes."""
        return self.row_bytes % 16 == 0 and all(buffer.data_ptr() % 16 == 0 for buffer in self)

    @cached_property
    def addresses(self) -> Tensor:
        """`[num_layers]` int64 on the buffers' device. Made at first use, which waits for the device once."""
        return self._addresses_on(self.device)

    def addresses_on(self, device: torch.device) -> Tensor:
        """`addresses` for kernels of `device`, which must be able to address the buffers, as it can pinned memory."""
        if device == self.device:
            return self.addresses
        if device not in self._elsewhere:
            self._elsewhere[device] = self._addresses_on(device)
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, Tensor]:
        return {}

    def _addresses_on(self, device: torch.device) -> Tensor:
        return torch.tensor([buffer.data_ptr() for buffer in self], dtype=torch.int64, device=device)


class Source(NamedTuple):
    """Buffers that rows are read from, of the same layers and rows as those that they are written to.

    They may be in pinned host memory while the targets are on a device.
    """

    keys: LayerBuffers
    values: LayerBuffers | None = None
