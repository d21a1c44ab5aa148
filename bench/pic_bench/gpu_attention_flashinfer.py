"""Owns FlashInfer's paged wrappers as a backend of `bench-prefill`, called as SGLang's FlashInfer backends call them.

Pages of one slot; every virtual sequence names its part of the row. Imports flashinfer, whose kernels are compiled at
first use.
"""

from __future__ import annotations

from typing import Final

import flashinfer
import torch
from torch import Tensor

from pic_bench.gpu_attention import Attend, AttentionShape
from pic_bench.gpu_extend import Extend

__all__ = ["FlashInferAttention"]

_WORKSPACE_BYTES: Final = 512 << 20


class FlashInferAttention:
    """`BatchPrefillWithPagedKVCacheWrapper`, and `BatchMLAPagedAttentionWrapper` where there is a latent."""

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        """Allocate the workspaces on `device`."""
        self._paged, self._latent = (
            wrapper(torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device))
            for wrapper in (
                flashinfer.BatchPrefillWithPagedKVCacheWrapper,
                flashinfer.mla.BatchMLAPagedAttentionWrapper,
            )
        )

    def plan(self, extend: Extend, slots: Tensor | None, shape: AttentionShape) -> Attend:
        """See `AttentionBackend`; only one pass at a time may be planned, for the wrappers keep it."""
        device = extend.row.device
        row = torch.arange(max(extend.seq_lens), device=device) if slots is None else slots
        indices = torch.cat([row[:seq_len] for seq_len in extend.seq_lens]).to(torch.int32)
        seq_lens = torch.tensor(extend.seq_lens)
        num_new = seq_lens - torch.tensor(extend.prefix_lens)
        query_starts, key_starts = (_starts(lens).to(device) for lens in (num_new, seq_lens))
        if shape.latent:
            self._latent.plan(
                query_starts,
                key_starts,
                indices,
                seq_lens.to(device, torch.int32),
                shape.heads,
                shape.latent,
                shape.qk_dim - shape.latent,
                1,
                True,
                shape.scale,
                shape.dtype,
                shape.dtype,
            )
        else:
            self._paged.plan(
                query_starts,
                key_starts,
                indices,
                torch.ones(len(seq_lens), dtype=torch.int32, device=device),
                shape.heads,
                shape.kv_heads,
                shape.qk_dim,
                1,
                head_dim_vo=shape.v_dim,
                causal=True,
                sm_scale=shape.scale,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
            )

        def attend(query: Tensor, keys: Tensor, values: Tensor | None) -> Tensor:
            if values is None:
                parts = query[..., : shape.latent], query[..., shape.latent :]
                # Both are parts of the same rows; the wrapper takes them with their strides.
                return self._latent.run(*parts, keys[..., : shape.latent], keys[..., shape.latent :])
            return self._paged.run(query, (keys.unsqueeze(1), values.unsqueeze(1)))

        return attend


def _starts(lens: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0))).to(torch.int32)
