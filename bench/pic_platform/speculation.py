"""Speculative decoding on the platform: the supported flags, and functions in the place of SGLang's kernels.

SGLang's workers (EAGLE, also with a head for each step, EAGLE3, MTP, STANDALONE, NGRAM) run as they are. For an
out-of-tree platform SGLang has a seam for the slots of a window and none for the other operators, so their names are
bound to plain PyTorch where the workers look them up. On a CPU SGLang runs drafts and verification one after the other,
without overlap scheduling.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final

from pic_platform import ATTENTION_BACKEND, slot_ops, tree_ops
from sglang_pic.errors import UnsupportedError

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

ALGORITHMS: Final = ("EAGLE", "EAGLE3", "NGRAM", "STANDALONE")
"""Names as SGLang resolves them: NEXTN is EAGLE."""

_REFUSED_FLAGS: Final = {
    "speculative_use_rejection_sampling": "its sampler is a Triton kernel",
}

_REPLACED: Final[dict[str, dict[str, Callable[..., object]]]] = {
    "sglang.srt.mem_cache.allocation": {"assign_req_to_token_pool_func": slot_ops.assign_slots},
    "sglang.srt.speculative.eagle_utils": {
        "build_tree_kernel_efficient_func": tree_ops.build_tree,
        "top_k_renorm_prob": tree_ops.renorm_top_k,
        "top_p_renorm_prob": tree_ops.renorm_top_p,
        "tree_speculative_sampling_target_only": tree_ops.verify_tree_sampling,
        "verify_tree_greedy_func": tree_ops.verify_tree_greedy,
    },
    "sglang.srt.speculative.eagle_worker_common": {
        "assign_draft_cache_locs_contiguous_func": slot_ops.draft_slots,
        "fill_bonus_tokens_func": slot_ops.bonus_tokens,
    },
    "sglang.srt.speculative.multi_layer_eagle_worker_v2": {"rotate_input_ids": slot_ops.shift_tokens},
    "sglang.srt.speculative.spec_utils": {
        "fill_accept_out_cache_loc_func": slot_ops.accepted_slots,
        "fill_front_out_cache_loc_func": slot_ops.front_slots,
    },
}
"""By the module that uses a name, because SGLang imports functions by name, and by that name."""


_MASK_READER: Final = "sglang.kernels.ops.speculative.reconstruct_tree"
"""The module of NGRAM's operator, which cannot be imported without `sgl_kernel`."""


def install() -> None:
    """Bind the operators in this process; idempotent.

    Raises:
        UnsupportedError: The platform lacks the feature of a flag, or SGLang has changed.
    """
    from sglang.srt.runtime_context import get_spec

    for flag, reason in _REFUSED_FLAGS.items():
        if getattr(get_spec(), flag):
            shown = "--" + flag.replace("_", "-")
            raise UnsupportedError(f"{shown} does not work on a CPU without compiled kernels: {reason}; remove it.")
    reader = ModuleType(_MASK_READER)
    reader.reconstruct_indices_from_tree_mask_func = tree_ops.reconstruct_tree  # type: ignore[attr-defined]
    sys.modules.setdefault(_MASK_READER, reader)
    for module_name, functions in _REPLACED.items():
        module = import_module(module_name)
        for name, function in functions.items():
            if not hasattr(module, name):
                raise UnsupportedError(
                    f"{module_name}.{name} is not there: use SGLang 0.5.23 for speculative decoding."
                )
            setattr(module, name, function)
    _bind_what_has_a_torch_form()
    from sglang.srt.speculative import eagle_worker_v2, multi_layer_eagle_worker_v2
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    factory = _make_factory(DraftBackendFactory)
    for worker in (eagle_worker_v2, multi_layer_eagle_worker_v2):
        worker.DraftBackendFactory = factory  # type: ignore[attr-defined]
    # It captures graphs unless this is SGLang's own CPU platform.
    multi_layer_eagle_worker_v2._is_cpu = True


def _bind_what_has_a_torch_form() -> None:
    """Choose SGLang's own form in PyTorch where it would choose a kernel, and wait for no CUDA device."""
    import torch
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import spec_utils

    def use_native_moves(pool: MHATokenToKVPool) -> None:
        pool.use_native_move_kv_cache, pool._kv_copy_config = True, None

    # Most models wait for their device once a draft has taken the target's embedding.
    torch.cuda.synchronize = lambda device=None: None
    allocation.get_last_loc = allocation.get_last_loc_torch
    MHATokenToKVPool._init_kv_copy_and_warmup = use_native_moves
    # Compiling it would take a C++ compiler and longer than any request.
    compiled = spec_utils._select_top_k_tokens_later
    spec_utils._select_top_k_tokens_later = getattr(compiled, "_torchdynamo_orig_callable", compiled)


class DraftSteps:
    """The attention of a draft's steps, each with slots of its own."""

    def __init__(self, runner: ModelRunner, topk: int, num_steps: int) -> None:
        """Make a backend for each step that computes; the first token of a draft was computed with the target's."""
        from pic_platform.attention_backend import CpuAttentionBackend

        self.attn_backends = [CpuAttentionBackend(runner) for _ in range(num_steps - 1)]
        self._topk, self._num_steps = topk, num_steps

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Look up the slots of all steps."""
        for step, backend in enumerate(self.attn_backends):
            backend.init_draft_step(forward_batch, self._topk, self._num_steps, step)


def _make_factory(base: type[DraftBackendFactory]) -> type[DraftBackendFactory]:
    """SGLang's factory of a draft's attention backends, which knows the platform's by name."""

    class CpuDraftBackendFactory(base):  # type: ignore[misc, valid-type]
        def _create_backend(
            self, backend_name: str, backend_map: dict[str, object], *args: object, **kwargs: object
        ) -> AttentionBackend:
            def steps() -> tuple[str, DraftSteps]:
                return ATTENTION_BACKEND, DraftSteps(self.draft_model_runner, self.topk, self.speculative_num_steps)

            def extend() -> tuple[str, None]:
                # SGLang then keeps the backend that the draft's runner has.
                return ATTENTION_BACKEND, None

            make = steps if kwargs.get("stamps_children") else extend
            return super()._create_backend(backend_name, backend_map | {ATTENTION_BACKEND: make}, *args, **kwargs)

    return CpuDraftBackendFactory
