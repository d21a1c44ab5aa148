"""How a gap batch is computed: by a captured graph or eagerly, and on which paths of the attention backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_pic.adapter.sglang.contract import BUILT_FOR, installed_version
from sglang_pic.adapter.sglang.seams import ModelRunner

# NOTE: off until a device has shown that graphs replay gap batches with adapters: `make gpu` measures both ways.
REPLAYS_LORA = False
# Attention backends for which DeepSeek's attention is always captured with the absorbed query.
_CAPTURED_ABSORBED = ("fa3", "flashinfer", "flashmla", "triton")
# FlashInfer's ragged path assumes whole extends. The dense path of `dsa` for short sequences projects whole prefixes
# again, and is chosen before a layer can choose the absorbed query.
_SWITCHES = {"use_paged": True, "supports_mha_one_shot": False}


def replays_gaps(runner: ModelRunner, num_sequences: int, *, is_latent: bool) -> bool:
    """Whether the runner's captured prefill graphs compute gap batches correctly, if they take as many tokens.

    A breakable graph runs attention eagerly, on the batch's own metadata, and its captured part does not depend on
    sequences. A full graph depends on their number. Other versions of SGLang are not tested.

    Args:
        runner: SGLang's model runner.
        num_sequences: virtual sequences of the gap batch.
        is_latent: MLA; only some backends capture the absorbed query, which a gap batch needs.
    """
    captured: Any = runner.prefill_cuda_graph_runner
    return (
        installed_version() == BUILT_FOR
        and getattr(captured, "prefill_backend_name", None) == "breakable"
        # The runner's static buffers have a place for each row of the request pool.
        and num_sequences <= captured.max_bs
        # LoRA adapters are laid out by request, not by sequence.
        and (REPLAYS_LORA or runner.lora_manager is None)
        and (not is_latent or runner.prefill_attention_backend_str in _CAPTURED_ABSORBED)
    )


@contextmanager
def prefill_path(runner: ModelRunner, *, replays: bool) -> Iterator[None]:
    """Run eagerly unless captured graphs replay gaps, on the backend's paths that take gaps (`_SWITCHES`)."""
    from sglang.srt.environ import envs

    captured = runner.prefill_cuda_graph_runner
    # `prefill_backend` is a hybrid backend's backend for prefill, but FlashInfer's name of a kernel; `dense` is the
    # backend of MiniMax-M3's other layers.
    served = runner.attn_backend
    candidates = (served, getattr(served, "prefill_backend", None), getattr(served, "dense", None))
    switched = [
        (backend, name, getattr(backend, name))
        for backend in candidates
        for name in _SWITCHES
        if hasattr(backend, name)
    ]
    if not replays:
        runner.prefill_cuda_graph_runner = None
    for backend, name, _ in switched:
        setattr(backend, name, _SWITCHES[name])
    try:
        # The runner's static input buffers are sized for requests, not for virtual sequences.
        with envs.SGLANG_EAGER_INPUT_NO_COPY.override(True):
            yield
    finally:
        runner.prefill_cuda_graph_runner = captured
        for backend, name, before in switched:
            setattr(backend, name, before)
