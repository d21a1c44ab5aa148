"""Pages of index keys: a sparse-attention indexer (DeepSeek-V3.2, GLM-5) scores tokens by these.

    page of 64 tokens     | 64 x 128 FP8 | 64 x float32 |
                            keys           one scale for each key

A buffer is `[num_pages, 1, PAGE_BYTES]` FP8; slot `s` is token `s % 64` of page `s // 64`. A key is its FP8 numbers
times its scale. Models that mix a key's dimensions by a Hadamard transform do so after its rotation.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

PAGE_TOKENS: Final = 64
KEY_DIM: Final = 128
SCALES_AT: Final = PAGE_TOKENS * KEY_DIM
"""First byte of a page's scales."""
PAGE_BYTES: Final = SCALES_AT + PAGE_TOKENS * 4
MIN_PEAK: Final = 1e-4
"""A key whose largest number is smaller is scaled as if it were this, as SGLang's writers do."""


def split_pages(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a buffer's keys `[num_pages, 64, 128]` uint8 and scales `[num_pages, 64]` float32."""
    flat = pages.view(torch.uint8).flatten(1)
    return flat[:, :SCALES_AT].unflatten(1, (PAGE_TOKENS, KEY_DIM)), flat.view(torch.float32)[:, SCALES_AT // 4 :]


def place(slots: Tensor) -> tuple[Tensor, Tensor]:
    """The page of each slot, and its token there."""
    return slots // PAGE_TOKENS, slots % PAGE_TOKENS


def read_keys(pages: Tensor, slots: Tensor) -> Tensor:
    """The keys of `slots`, `[n, 128]` float32, as they are stored: mixed, where the model mixes them."""
    at, (keys, scales) = place(slots), split_pages(pages)
    return keys[at].view(torch.float8_e4m3fn).to(torch.float32) * scales[at].unsqueeze(1)


def quantise(keys: Tensor) -> tuple[Tensor, Tensor]:
    """`keys`, `[..., 128]` float32, as FP8 of the same shape and scales `[...]`: the largest number becomes 448."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    scales = keys.abs().amax(-1).clamp(min=MIN_PEAK) / limit
    return (keys / scales.unsqueeze(-1)).clamp(-limit, limit).to(torch.float8_e4m3fn), scales


def hadamard(keys: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of the last dimension, a power of two; its own inverse."""
    mixed, width = keys, keys.shape[-1]
    for bit in range(width.bit_length() - 1):
        a, b = mixed.unflatten(-1, (-1, 2, 1 << bit)).unbind(-2)
        mixed = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return mixed * width**-0.5
