"""One attention layer of a server without the server: real pools, SGLang's batch, and the plugin's narrowing.

A world has requests whose true keys and values are known. The prefix, the runs and the tokens that a decoding request
has are in the pool; what the gap batch computes is not, and every slot that nobody owns holds NaN. A backend is given
the narrowed batch, writes the new rows, and must give what dense attention over the true rows gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_server_args
from transformers import LlamaConfig

from sglang_pic.adapter.serve.gap_batch import GapBatch, build_gap_batch
from tests.backends.cases import Case, Shape
from tests.backends.kernels import Scoring, attend
from tests.helpers.builders import extend_batch, make_pool, splice

CONTEXT_LEN = 256
ROWS = 48
"""Of the request pool: room for as many virtual sequences in backends with tables."""
LAYERS = 2


class World:
    """The pools of a server with the requests of one case, and their true keys and values."""

    def __init__(self, case: Case, shape: Shape, page_size: int, dtype: torch.dtype) -> None:
        self.case, self.shape, self.page_size, self.dtype = case, shape, page_size, dtype
        self._random = torch.Generator().manual_seed(7)
        self.rows = ReqToTokenPool(size=ROWS, max_context_len=CONTEXT_LEN, device="cpu", enable_memory_saver=False)
        num_pages = sum(-(-request.end // page_size) for request in case.requests) + 4
        self.pool = self._make_pool(num_pages * page_size)
        self.row_ids = [3 * i + 2 for i in range(len(case.requests))]
        self._give_slots(num_pages)
        self.keys = [self._draw(LAYERS, request.end, shape.kv_heads, shape.dim) for request in case.requests]
        self.values = [
            keys[..., : shape.value_dim]
            if shape.is_mla
            else self._draw(LAYERS, keys.shape[1], shape.kv_heads, shape.value_dim)
            for keys in self.keys
        ]
        self.queries = [self._draw(LAYERS, request.end, shape.heads, shape.dim) for request in case.requests]
        self.runner = self._make_runner()
        self.layers = [
            RadixAttention(
                shape.heads,
                shape.dim,
                shape.dim**-0.5,
                shape.kv_heads,
                layer_id=i,
                logit_cap=shape.cap,
                v_head_dim=shape.value_dim,
                sliding_window_size=-1 if i or shape.window is None else shape.window,
                use_irope=not i and shape.chunk is not None,
            )
            for i in range(LAYERS)
        ]
        self.sinks = self._draw(LAYERS, shape.heads) if shape.has_sinks else None

    def slots(self, index: int) -> torch.Tensor:
        return self.rows.req_to_token[self.row_ids[index], : self.case.requests[index].end].long()

    def fill_pool(self, *, skip_runs: bool = False) -> None:
        """Every slot NaN but those of prefixes and runs, as the splice leaves them."""
        for layer in range(LAYERS):
            for buffer, true in zip(self._buffers(layer), (self.keys, self.values), strict=False):
                buffer.fill_(float("nan"))
                for i, request in enumerate(self.case.requests):
                    slots, rows = self._slots_in(layer, self.slots(i)), true[i][layer]
                    buffer[slots[: request.prefix_len]] = rows[: request.prefix_len]
                    for start, end in request.runs:
                        buffer[slots[start:end]] = 0.25 if skip_runs else rows[start:end]

    def whole_batch(self) -> ForwardBatch:
        """The batch as SGLang makes it: one extend per request."""
        requests = self.case.requests
        batch: ForwardBatch = extend_batch(
            [r.end - r.prefix_len for r in requests],
            prefix_lens=[r.prefix_len for r in requests],
            rows=self.row_ids,
            out_cache_loc=torch.cat([self.slots(i)[r.prefix_len :] for i, r in enumerate(requests)]),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        batch.forward_mode = ForwardMode.MIXED if self.case.is_mixed else ForwardMode.EXTEND
        return self._bind(batch)

    def decode_batch(self) -> ForwardBatch:
        """The last token of every request, as the next pass decodes it."""
        ends = torch.tensor([request.end for request in self.case.requests])
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(ends),
            input_ids=torch.zeros_like(ends),
            positions=ends - 1,
            **{name: torch.tensor(self.row_ids) for name in ("req_pool_indices", "req_pool_indices_cpu")},
            **{name: ends.clone() for name in ("seq_lens", "seq_lens_cpu")},
            seq_lens_sum=int(ends.sum()),
            orig_seq_lens=ends.int(),
            out_cache_loc=torch.stack([self.slots(i)[-1] for i in range(len(ends))]),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        return self._bind(batch)

    def gap_batch(self) -> GapBatch:
        requests = self.case.requests
        plans = [(r.prefix_len, r.end, *((start, end, 0) for start, end in r.runs)) for r in requests]
        pending = [splice(*each) if len(each) > 2 else None for each in plans]
        prefix_lens, lens = [r.prefix_len for r in requests], [r.end - r.prefix_len for r in requests]
        rows = [self.rows.req_to_token[row] for row in self.row_ids]
        return build_gap_batch(pending, prefix_lens, lens, lens, rows, torch.device("cpu"))

    def spans(self) -> list[tuple[int, int, int]]:
        """What the case computes, as `(request, start, end)` in the order of the batch."""
        spans = []
        for i, request in enumerate(self.case.requests):
            position = request.prefix_len
            for start, end in (*request.runs, (request.end, request.end)):
                if start > position:
                    spans.append((i, position, start))
                position = end
        return spans

    def expected(self, layer: int, spans: list[tuple[int, int, int]], *, unseen: int = 0) -> torch.Tensor:
        """Dense causal attention in float64, `[num_tokens, heads, value_dim]`; windows are `unseen` keys shorter."""
        shape = self.shape
        window = -1 if layer or shape.window is None else shape.window - unseen
        scoring = Scoring(window, shape.cap, None if self.sinks is None else self.sinks[layer])
        out = []
        chunk = CONTEXT_LEN if layer or shape.chunk is None else shape.chunk
        for i, start, end in (part for span in spans for part in _in_chunks(*span, chunk)):
            first = start // chunk * chunk
            keys, values = self.keys[i][layer, first:end], self.values[i][layer, first:end]
            query = self.queries[i][layer, start:end].double()
            out.append(attend(query, keys, values, shape.dim**-0.5, causal=True, scoring=scoring))
        return torch.cat(out)

    def _bind(self, batch: ForwardBatch) -> ForwardBatch:
        batch.global_num_token_non_padded_cpu = len(batch.positions)
        translator = self.runner.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)
        return batch

    def _draw(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._random).to(self.dtype)

    def _make_pool(self, size: int) -> Any:
        common: dict[str, Any] = {"size": size, "page_size": self.page_size, "dtype": self.dtype}
        if self.shape.is_mla:
            latent = {"kv_lora_rank": self.shape.value_dim, "qk_rope_head_dim": self.shape.rope_dim}
            return make_pool("mla", **common, **latent, layer_num=LAYERS)
        heads = {"head_num": self.shape.kv_heads, "head_dim": self.shape.dim}
        if not self.shape.has_window_pool:
            return make_pool("mha", **common, **heads, layer_num=LAYERS)
        layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [*range(1, LAYERS)]}
        pool = SWAKVPool(size_swa=size, device="cpu", enable_memory_saver=False, **common, **heads, **layers)
        # The pages in the opposite order.
        slots = torch.arange(size + self.page_size + 1)
        reversed_slots = size + self.page_size - slots + 2 * (slots % self.page_size)
        pool.register_mapping(torch.where(slots < self.page_size, 0, reversed_slots))
        return pool

    def _slots_in(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return slots if layer or not self.shape.has_window_pool else self.pool.full_to_swa_index_mapping[slots]

    def _buffers(self, layer: int) -> list[torch.Tensor]:
        keys = self.pool.get_key_buffer(layer)
        return [keys] if self.shape.is_mla else [keys, self.pool.get_value_buffer(layer)]

    def _give_slots(self, num_pages: int) -> None:
        """Scattered pages; behind a row's end the table names a slot that nobody owns."""
        order = torch.randperm(num_pages - 1, generator=self._random) + 1
        self.rows.req_to_token.fill_(int(order[-1]) * self.page_size)
        taken = 0
        for row, request in zip(self.row_ids, self.case.requests, strict=True):
            count = -(-request.end // self.page_size)
            first = order[taken : taken + count, None] * self.page_size
            slots = (first + torch.arange(self.page_size)).flatten()[: request.end]
            self.rows.req_to_token[row, : request.end] = slots.int()
            taken += count

    def _make_runner(self) -> Any:
        """What the backends' constructors read of SGLang's model runner."""
        shape = self.shape
        text_config = LlamaConfig(architectures=["LlamaForCausalLM"], num_attention_heads=shape.heads)
        text_config.attn_logit_softcapping = shape.cap or None
        widths = ("v_head_dim", "swa_v_head_dim", "kv_lora_rank", "qk_nope_head_dim")
        config = SimpleNamespace(
            **dict.fromkeys(widths, shape.value_dim),
            **{"head_dim": shape.dim, "qk_rope_head_dim": shape.rope_dim, "hidden_size": shape.heads * shape.dim},
            **{"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads},
            **{"context_len": CONTEXT_LEN, "scaling": shape.dim**-0.5, "linear_attn_registry_result": None},
            attention_arch=AttentionArch.MLA if shape.is_mla else AttentionArch.MHA,
            **dict.fromkeys(("is_encoder_decoder", "is_multimodal"), False),
            is_local_attention_model=shape.chunk is not None,
            **dict.fromkeys(("hf_config", "hf_text_config"), text_config),
            get_num_kv_heads=lambda *_: shape.kv_heads,
            get_max_num_attention_heads=lambda: shape.heads,
        )
        allocator = SimpleNamespace(get_kvcache=lambda: self.pool, page_size=self.page_size)
        return SimpleNamespace(
            model_config=config,
            model=torch.nn.Module(),
            **{"device": "cpu", "gpu_id": 0, "kv_cache_dtype_str": "auto", "page_size": self.page_size},
            **dict.fromkeys(("dtype", "kv_cache_dtype"), self.dtype),
            sliding_window_size=shape.window or shape.answer_window,
            prefill_aware_swa=shape.answer_window is not None,
            attention_chunk_size=shape.chunk,
            **dict.fromkeys(("is_draft_worker", "init_new_workspace"), False),
            **dict.fromkeys(("spec_algorithm", "lora_manager", "prefill_cuda_graph_runner")),
            server_args=get_server_args(),
            max_running_requests=ROWS,
            use_mla_backend=shape.is_mla,
            decode_num_tokens_per_req=lambda: 1,
            req_to_token_pool=self.rows,
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=allocator,
            kv_index_translator=KVIndexTranslator(
                req_to_token=self.rows.req_to_token,
                token_to_kv_pool_allocator=allocator,
                token_to_kv_pool=self.pool,
                page_size=self.page_size,
                device="cpu",
            ),
        )


def _in_chunks(index: int, start: int, end: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a span that lie in one chunk each."""
    while start < end:
        stop = min(end, (start // chunk + 1) * chunk)
        yield index, start, stop
        start = stop
