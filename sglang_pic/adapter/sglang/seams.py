"""The members of SGLang's objects that this adapter reads and writes, as types.

SGLang is untyped to our type checker, so each protocol lists exactly the members that our code uses. At start-up
`contract.py` looks them up in the installed SGLang, in the class that `SEAMS` names. Lengths and positions are in
tokens; tensors are on the model's device unless their name ends in `_cpu`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import torch


class Req(Protocol):
    """`schedule_batch.Req`: one request in the scheduler."""

    rid: str
    cache_request_handle: Any  # its identity in HiCache
    sampling_params: Any  # `custom_params`, the client's dict, has our options under the key "pic"
    pic: Any  # ours: `serve.state.RequestState`, set when the request is built

    # The namespace of its rows in the tree.
    extra_key: str | None
    cache_salt: str | None
    lora_id: str | None

    # May name its session.
    session_id: str | None
    routing_key: str | None

    origin_input_ids: array[int]  # the prompt, int64
    full_untruncated_fill_ids: array[int]  # to be prefilled: the prompt, after a retraction the answer so far too
    output_ids: Sequence[int]
    prefix_len: int  # tokens that have rows: the exact prefix hit, and the chunks prefilled so far
    extend_end: int  # end of the last admitted chunk
    kv: Any  # `req_pool_idx`: its row in the request pool
    finished_reason: object | None
    retracted_stain: bool  # it was retracted once, and its prefill began again

    # Decide whether its rows can be reused.
    return_logprob: bool
    logprob_start_len: int  # first prompt position whose logprob is wanted, or -1
    return_hidden_states: bool | str
    input_embeds: object | None
    positional_embed_overrides: object | None
    multimodal_inputs: MediaInputs | None
    multi_item_delimiter_indices: object | None
    token_indices_to_pool: object | None
    session: Any | None  # `streaming`: the session keeps its rows over all turns

    # Tokens that were not computed, for the client.
    cached_tokens: int
    cached_tokens_host: int
    cached_tokens_storage: int

    host_hit_length: int  # tokens after `prefix_len` that HiCache has on the host


class StatefulReq(Req, Protocol):
    """`schedule_batch.Req` of a model with recurrent state; its `kv` has `mamba_last_track_seqlen`, the place of the
    state that the last pass keeps."""

    mamba_branching_seqlen: int | None  # where a pass keeps its state, if it can; None for its end
    skip_radix_cache_insert: bool


class ReceivedReq(Req, Protocol):
    """`schedule_batch.Req` on a decode server."""

    skip_radix_cache_insert: bool


class MediaItem(Protocol):
    """`schedule_batch.MultimodalDataItem`: one image, video or sound."""

    hash: int | None
    identity: bytes | None  # a longer hash, of models that make one
    offsets: list[tuple[int, int]] | None  # first and last places of its tokens in the prompt
    model_specific_data: dict[str, object]

    def is_image(self) -> bool: ...


class MediaInputs(Protocol):
    """`schedule_batch.MultimodalInputs`: the media of a request."""

    mm_items: Sequence[MediaItem]
    mrope_positions: torch.Tensor | None  # `[3, num_tokens]` of the prompt; of what is prefilled after a retraction


class ScheduleBatch(Protocol):
    """`schedule_batch.ScheduleBatch`: the scheduler's next batch; lists are by request."""

    forward_mode: Any  # `is_extend_without_speculative()` and `is_extend()`, as a mixed batch is too
    reqs: Sequence[Req]
    multimodal_inputs: Sequence[object] | None
    prefix_lens: Sequence[int]
    extend_lens: Sequence[int]
    extend_logprob_start_lens: Sequence[int]  # tokens of the extend before the first wanted logprob, or all
    extend_num_tokens: int | None


class ForwardBatch(Protocol):
    """`forward_batch_info.ForwardBatch`: the model's input."""

    batch_size: int
    input_ids: torch.Tensor  # `[num_tokens]`, as are positions and out_cache_loc
    positions: torch.Tensor
    out_cache_loc: torch.Tensor  # the slots that new rows are written to
    req_pool_indices: torch.Tensor  # `[batch_size]`: rows of the request pool
    req_pool_indices_cpu: torch.Tensor | None
    seq_lens: torch.Tensor  # `[batch_size]`: each sequence with its prefix
    orig_seq_lens: torch.Tensor | None
    extend_seq_lens: torch.Tensor  # `[batch_size]`, int32: computed tokens of each sequence
    extend_seq_lens_cpu: list[int]
    extend_logprob_start_lens_cpu: list[int]
    rids: list[str] | None
    lora_ids: list[str | None] | None
    mm_inputs: list[Any] | None
    mm_input_embeds: torch.Tensor | None  # of a draft model's prefill of media: `[num_tokens, width]`
    mrope_positions: torch.Tensor | None  # `[3, num_tokens]`
    mm_token_modalities: torch.Tensor | None
    global_num_token_non_padded: torch.Tensor | None
    spec_info: Any | None  # of a draft model's prefill: `hidden_states`, the target's, `[num_tokens, width]` or None


class RunnerOutput(Protocol):
    """The result of `ModelRunner.forward`."""

    # `next_token_logits`: `[batch_size, vocab_size]` or None; sampling changes them in place. `mm_input_embeds`, of a
    # batch with media: those of all tokens, `[num_tokens, width]`, or None
    logits_output: Any


class ModelConfig(Protocol):
    """`model_config.ModelConfig`."""

    context_len: int
    vocab_size: int
    dtype: torch.dtype
    is_multimodal: bool
    model_is_mrope: bool
    attention_chunk_size: int | None  # positions that attend to each other only
    use_ngram_embedding: bool  # a token's embedding depends on the tokens before it


class ModelRunner(Protocol):
    """`model_runner.ModelRunner`."""

    device: str
    model: torch.nn.Module
    model_config: ModelConfig
    req_to_token_pool: Any  # `req_to_token`: `[size, context_len]`, int32, the slot of each token of each row
    token_to_kv_pool: Any  # of many kinds; `runtime.views.view_pool` reads it
    token_to_kv_pool_allocator: Allocator
    kv_index_translator: Any
    lora_manager: Any | None
    attn_backend: Any
    prefill_attention_backend_str: str
    use_mla_backend: bool
    prefill_aware_swa: bool  # decoding attends to the whole prompt and a window of the answer
    prefill_cuda_graph_runner: object | None  # `prefill_backend_name`, `max_bs`; None: prefill is computed eagerly
    shared_read_done_event: object | None
    forward_stream: Any
    spec_algorithm: object
    is_draft_worker: bool

    def forward(self, forward_batch: Any) -> RunnerOutput: ...


class Allocator(Protocol):
    """`BaseTokenToKVPoolAllocator`: the slots of the KV pool, in whole pages."""

    size: int  # of two pools the smaller one's
    page_size: int

    def available_size(self) -> int: ...
    def alloc(self, need_size: int) -> torch.Tensor | None: ...
    def free(self, free_index: torch.Tensor) -> None: ...


class Tree(Protocol):
    """`UnifiedRadixCache`: the radix tree."""

    token_to_kv_pool_allocator: Allocator
    page_size: int
    # `collect_path_info`; HiCache: `build_hicache_transfers`, `inc_host_lock_ref`, `dec_host_lock_ref`; windows:
    # `swa_tombstone_ranges`
    tree_core: Any
    # HiCache's, or None: `ack_load_queue`, `mem_pool_host`, `storage_backend`
    cache_controller: Any

    # HiCache's store.
    enable_storage: bool
    prefetch_loaded_tokens_by_reqid: dict[Any, int]
    prefetch_loaded_storage_start_by_reqid: dict[Any, int]

    def has_ongoing_prefetch(self, handle: Any) -> bool: ...

    def supports_swa(self) -> bool: ...  # whether windows have a pool of their own
    def evictable_size(self) -> int: ...
    def full_evictable_size(self) -> int: ...
    def swa_evictable_size(self) -> int: ...
    def match_prefix(self, params: Any) -> Any: ...
    def path_device_indices(self, node: Any) -> torch.Tensor: ...
    def lock(self, node_id: Any) -> object: ...
    def unlock(self, lock: Any) -> None: ...


class WindowTree(Tree, Protocol):
    """A tree of a server with windows in a pool of their own."""

    swa_retain_window: int | None  # tokens of a window in the tree


class Scheduler(Protocol):
    """`scheduler.Scheduler`, between two rounds."""

    tree_cache: Tree
    waiting_queue: Sequence[Req]
    chunked_req: Req | None
    enable_overlap: bool  # the next round is scheduled while a pass runs, on a stream of its own
    result_queue: Sequence[tuple[Any, Any]]  # with overlap: the passes that were launched, `(batch, result)`
    forward_stream: Any
    schedule_stream: Any
    forward_stream_ctx: AbstractContextManager[Any]
    device_module: Any  # `torch.cuda`, `torch.cpu`, ...

    def is_fully_idle(self) -> bool: ...


class TpGroup(Protocol):
    """`GroupCoordinator`: the tensor-parallel ranks."""

    world_size: int
    rank_in_group: int
    ranks: Sequence[int]  # among all processes
    cpu_group: Any  # `group` of `torch.distributed`


class BuildContext(Protocol):
    """`TreeCacheBuildContext`: the argument of a cache's factory."""

    server_args: Any
    # `page_size`; `is_eagle`: the tree identifies a row by its token and the next one; with HiCache and a draft
    # `mtp_draft_device_pools`, `sidecar_draft_device_pools`
    params: Any
    tp_worker: Any  # `model_runner`
    tp_group: TpGroup | None
    tp_rank: int
    model_config: ModelConfig
    disable_radix_cache: bool
    enable_hierarchical_cache: bool
    is_hybrid_swa: bool
    full_tokens_per_layer: int | None  # with windows in a pool of their own, slots of all other layers
    is_hybrid_ssm: bool
    is_dsa: bool


_SRT = "sglang.srt"
SEAMS: Final[dict[type, str]] = {
    Req: f"{_SRT}.managers.schedule_batch.Req",
    ScheduleBatch: f"{_SRT}.managers.schedule_batch.ScheduleBatch",
    ForwardBatch: f"{_SRT}.model_executor.forward_batch_info.ForwardBatch",
    RunnerOutput: f"{_SRT}.model_executor.model_runner.ModelRunnerOutput",
    ModelRunner: f"{_SRT}.model_executor.model_runner.ModelRunner",
    ModelConfig: f"{_SRT}.configs.model_config.ModelConfig",
    Allocator: f"{_SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator",
    Tree: f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache",
    BuildContext: f"{_SRT}.mem_cache.registry.TreeCacheBuildContext",
    Scheduler: f"{_SRT}.managers.scheduler.Scheduler",
    TpGroup: f"{_SRT}.distributed.parallel_state.GroupCoordinator",
}
"""The class of SGLang that each protocol describes."""
FEATURE_SEAMS: Final[dict[str, dict[type, str]]] = {
    "checkpoints": {StatefulReq: f"{_SRT}.managers.schedule_batch.Req"},
    "disaggregation": {ReceivedReq: f"{_SRT}.managers.schedule_batch.Req"},
    "images": {
        MediaItem: f"{_SRT}.managers.schedule_batch.MultimodalDataItem",
        MediaInputs: f"{_SRT}.managers.schedule_batch.MultimodalInputs",
    },
    "windows": {WindowTree: f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache"},
}
"""The same for features: only servers with the feature use these classes."""


def members(seam: type) -> tuple[str, ...]:
    """The names that a protocol lists, without our own."""
    return tuple(name for name in (*seam.__annotations__, *vars(seam)) if not name.startswith("_") and name != "pic")
