"""`LayerBuffers`: checked once, and a table of addresses that stays true."""

from __future__ import annotations

import torch
from pic_kernels import LayerBuffers


def test_the_table_holds_every_layers_address() -> None:
    buffers = [torch.zeros(3, 2, 8) for _ in range(5)]
    layers = LayerBuffers(buffers)
    assert layers.addresses.tolist() == [buffer.data_ptr() for buffer in buffers]
    assert layers.addresses.dtype == torch.int64
    assert layers.row_bytes == 2 * 8 * 4
    assert layers.is_aligned


def test_buffers_are_kept_where_they_were() -> None:
    """A tensor that its owner points elsewhere leaves the table and the memory it names as they were."""
    buffer = torch.arange(32.0).view(4, 1, 8)
    layers = LayerBuffers([buffer])
    address = layers.addresses.tolist()
    buffer.set_(torch.zeros(4, 1, 8))
    del buffer
    assert [each.data_ptr() for each in layers] == address
    assert layers[0].sum() == 31 * 16


def test_one_is_taken_as_it_is() -> None:
    layers = LayerBuffers([torch.zeros(4, 1, 8)])
    assert LayerBuffers.of("buffers", layers) is layers
    assert LayerBuffers.of("buffers", [layers[0]]) is not layers
