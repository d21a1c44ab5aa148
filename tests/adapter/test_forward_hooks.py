"""The forward hooks: which backend is switched, and which batches are left alone."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    # SGLang and what it imports warn about this machine's missing accelerators.
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang.srt.mem_cache.unified_radix_cache")
    from sglang_pic.adapter.serve.forward import _eager_prefill, _goes_by_place


@pytest.mark.parametrize("hybrid", [False, True])
def test_flashinfer_reads_pages_while_a_gap_batch_runs_beside_another_decode_backend_too(hybrid: bool) -> None:
    """Its ragged path reads the prefix before the layer's own keys are written: a gap would see rows of before."""
    flashinfer = SimpleNamespace(use_paged=False)
    backend = SimpleNamespace(prefill_backend=flashinfer, decode_backend=object()) if hybrid else flashinfer
    runner = SimpleNamespace(attn_backend=backend, prefill_cuda_graph_runner="captured")
    with _eager_prefill(runner):
        assert flashinfer.use_paged
        assert runner.prefill_cuda_graph_runner is None
    assert not flashinfer.use_paged
    assert runner.prefill_cuda_graph_runner == "captured"


def test_a_request_that_goes_by_its_place_in_the_batch_is_known() -> None:
    plain = {"input_embeds": None, "positional_embed_overrides": None, "return_hidden_states": False}
    assert not _goes_by_place(SimpleNamespace(**plain))
    for name, value in (
        ("input_embeds", [[0.0]]),
        ("positional_embed_overrides", "some"),
        ("return_hidden_states", "last"),
    ):
        assert _goes_by_place(SimpleNamespace(**{**plain, name: value}))
