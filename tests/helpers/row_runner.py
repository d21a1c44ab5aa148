"""A model runner whose pass writes the rows that its tokens and positions ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import factory
from torch import nn

from sglang_pic.adapter.serve.forward import ForwardPath
from sglang_pic.runtime import RopeGeometry, read_geometry, view_pool
from sglang_pic.runtime.splice import Splicer
from tests.helpers.builders import BareRunner, make_path, make_pool
from tests.helpers.rope_models import RadixAttention


class Runner(BareRunner):
    """SGLang's model runner with two layers of attention that follows the page table, a splice path around it."""

    prefill_attention_backend_str = "by hand"
    is_draft_worker = False

    def __init__(self, page_size: int = 1, size: int = 256) -> None:
        super().__init__(64)
        self.token_to_kv_pool = pool = make_pool("mha", size=size, page_size=page_size, layer_num=2)
        self.buffers = [*pool.k_buffer, *pool.v_buffer]
        self.rotary = factory.get_rope(64, 64, 9_000, 10_000, True, None, dtype=torch.float32)
        self.embedding = torch.randn((1_000, 2, 64), generator=torch.Generator().manual_seed(0))
        self.model = nn.ModuleList(
            nn.ModuleDict({"rotary_emb": self.rotary, "attn": RadixAttention(layer)}) for layer in range(2)
        )
        self.positions: list[int] = []
        self.path: ForwardPath | None = None
        self.reads_prefix = True

    def forward(self, batch: Any) -> Any:
        if self.path is None:
            return self.compute(batch)
        return self.path._forward(lambda _, batch: self.compute(batch), self, batch)  # type: ignore[arg-type]

    def compute(self, batch: Any) -> Any:
        """Write the rows of both layers; the second one's come from the first one's attention."""
        table, slots, pool = self.req_to_token_pool.req_to_token, batch.out_cache_loc, self.token_to_kv_pool
        self.positions.append(int(batch.positions[0]))
        hidden = self.embed(batch)
        for layer in range(2):
            _, keys = self.rotary.forward_native(batch.positions, hidden.clone(), hidden.clone())
            queries, keys = keys.view_as(hidden), keys.view_as(hidden)
            pool.k_buffer[layer][slots], pool.v_buffer[layer][slots] = keys.bfloat16(), hidden.bfloat16()
            read, first = [], 0
            sequences = batch.req_pool_indices, batch.extend_prefix_lens, batch.extend_seq_lens
            for row, prefix, new in zip(*(each.tolist() for each in sequences), strict=True):
                seen = table[row, : prefix + new].long()
                written = slots[first : first + new].tolist()
                assert seen[prefix:].tolist() == written, "the page table names what is written"
                k, v = pool.k_buffer[layer][seen].float(), pool.v_buffer[layer][seen].float()
                mask = torch.full((new, prefix + new), -torch.inf).triu(prefix + 1)
                if not self.reads_prefix:
                    mask[:, :prefix] = -torch.inf
                scores = torch.einsum("qhd,khd->hqk", queries[first : first + new], k) / 8 + mask
                read.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
                first += new
            hidden = hidden + torch.cat(read)
        logits = torch.zeros(batch.batch_size if self.path is None else 1, 4)
        outputs = {"next_token_logits": logits, "hidden_states": hidden, "mm_input_embeds": batch.mm_input_embeds}
        return SimpleNamespace(logits_output=SimpleNamespace(**outputs))

    def embed(self, batch: Any) -> torch.Tensor:
        """`[num_tokens, 2, 64]`."""
        return self.embedding[batch.input_ids]

    def splicer(self, geometry: RopeGeometry | None = None) -> Splicer:
        """As a server has it, in the path of its forward passes."""
        splicer = Splicer(view_pool(self.token_to_kv_pool), geometry or geometry_of(self))
        self.path = make_path(splicer)
        return splicer


def geometry_of(runner: Runner) -> RopeGeometry:
    return read_geometry(runner.model, max_shift=8_192)
