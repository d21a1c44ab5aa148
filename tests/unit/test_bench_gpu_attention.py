"""Backends of the prefill benchmark that need a GPU: Triton's kernel interpreted, FlashInfer's calls as documented."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from pic_bench import gpu_attention
from pic_bench.gpu_attention import AttentionShape, make_backend
from pic_bench.gpu_check import check_attention
from torch import Tensor

from sglang_pic.errors import UnsupportedError

CPU = torch.device("cpu")
GROUPED = AttentionShape(8, 2, 16, 16, 0.25, 0, torch.float32)
LATENT = AttentionShape(4, 1, 48, 32, 0.2, 32, torch.float32)
EXPANDED = AttentionShape(4, 4, 32, 16, 0.2, 0, torch.float32)


# A process of its own: Triton reads the variable when it is imported, for its own library too.
INTERPRETED = """
import torch
from pic_bench.gpu_attention import AttentionShape, make_backend
from pic_bench.gpu_check import check_attention
from sglang_pic.errors import UnsupportedError
torch.set_num_threads(1)
backend = make_backend("triton", torch.device("cpu"))
for numbers in {shapes!r}:
    print(check_attention(backend, AttentionShape(*numbers, torch.float32), torch.device("cpu")))
try:
    check_attention(backend, AttentionShape(6, 2, 16, 16, 0.25, 0, torch.float32), torch.device("cpu"))
except UnsupportedError as error:
    print(error)
"""


def test_triton_attends_as_float32_does() -> None:
    pytest.importorskip("triton")
    code = INTERPRETED.format(shapes=[tuple(shape)[:-1] for shape in (GROUPED, LATENT, EXPANDED)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    *errors, refusal = done.stdout.splitlines()
    assert len(errors) == 3
    assert all(float(error) < 1e-6 for error in errors)
    assert "must be powers of two" in refusal


@pytest.mark.parametrize("block", [1, 4, 32])
def test_tiles_cover_every_query_once(block: int) -> None:
    pytest.importorskip("triton")
    from pic_bench.gpu_attention_triton import tile_queries

    tiles = tile_queries([0, 40, 64], [33, 41, 214], block)
    covered = [(first + i, position + i) for first, count, position in tiles.tolist() for i in range(count)]
    positions = [*range(33), 40, *range(64, 214)]
    assert sorted(covered) == list(enumerate(positions))
    assert np.all(tiles[:, 1] <= block)
    assert np.all(np.diff(tiles[:, 2]) <= 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_backend_that_cannot_run_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=f"attention backend {name}: (needs a GPU|the package is not)"):
        make_backend(name, CPU)
    monkeypatch.setattr(gpu_attention, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="not installed"):
        make_backend(name, CPU)


class _Paged:
    """FlashInfer 0.5.3's two wrappers in plain torch, with its parameters by name and place; pages of one slot."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert paged_kv_last_page_len.tolist() == [1] * (len(qo_indptr) - 1)
        assert {t.dtype for t in (qo_indptr, paged_kv_indptr, paged_kv_indices)} == {torch.int32}
        assert (page_size, causal, q_data_type, kv_data_type) == (1, True, torch.float32, torch.float32)
        self.starts, self.key_starts, self.indices = qo_indptr, paged_kv_indptr, paged_kv_indices
        self.group, self.scale = num_qo_heads // num_kv_heads, sm_scale or 0.0
        self.dims = (head_dim_qk, head_dim_vo)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert keys.shape[1] == values.shape[1] == 1
        assert (keys.shape[-1], values.shape[-1]) == self.dims
        return self._attend(q, keys[:, 0], values[:, 0])

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = []
        for i in range(len(self.starts) - 1):
            query = q[self.starts[i] : self.starts[i + 1]]
            slots = self.indices[self.key_starts[i] : self.key_starts[i + 1]]
            k, v = (part[slots].repeat_interleave(self.group, dim=1) for part in (keys, values))
            hidden = torch.ones(len(query), len(slots)).triu(len(slots) - len(query) + 1).bool()
            scores = torch.einsum("qhd,khd->hqk", query, k) * self.scale
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
        return torch.cat(out)


class _Latent(_Paged):
    def __init__(self, float_workspace_buffer: Tensor) -> None:
        super().__init__(float_workspace_buffer)

    def plan(  # type: ignore[override]
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert kv_len_arr.tolist() == kv_indptr.diff().tolist()
        assert (page_size, causal, q_data_type, kv_data_type) == (1, True, torch.float32, torch.float32)
        self.starts, self.key_starts, self.indices = qo_indptr, kv_indptr, kv_indices
        self.group, self.scale, self.dims = num_heads, sm_scale, (head_dim_ckv, head_dim_kpe)

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:  # type: ignore[override]
        assert (ckv_cache.shape[-1], kpe_cache.shape[-1]) == self.dims
        return self._attend(torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache, kpe_cache), -1), ckv_cache)


@pytest.mark.parametrize("shape", [GROUPED, LATENT, EXPANDED], ids=["grouped", "latent", "expanded"])
def test_flashinfer_is_told_the_virtual_sequences(shape: AttentionShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package needs a GPU; what it is given is checked against what it documents."""
    fake = ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = _Paged  # type: ignore[attr-defined]
    fake.mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=_Latent)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.delitem(sys.modules, "pic_bench.gpu_attention_flashinfer", raising=False)
    backend = importlib.import_module("pic_bench.gpu_attention_flashinfer").FlashInferAttention(CPU)
    monkeypatch.delitem(sys.modules, "pic_bench.gpu_attention_flashinfer")
    assert check_attention(backend, shape, CPU) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "triton", "flashinfer"])
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "DeepSeek-V2-Lite"])
def test_on_a_gpu(name: str, model: str) -> None:
    """At the heads of real models, in bf16; expanded where there is a latent."""
    from pic_bench.gpu_dims import MODELS

    if name != "torch" and find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    dims = MODELS[model]
    kv_heads = dims.heads if dims.latent else dims.kv_heads
    shape = AttentionShape(dims.heads, kv_heads, dims.qk_dim, dims.v_dim, dims.scale, 0, torch.bfloat16)
    device = torch.device("cuda")
    check_attention(make_backend(name, device), shape, device)
    if dims.latent and name != "torch":
        latent = AttentionShape(dims.heads, 1, dims.row_dim, dims.latent, dims.scale, dims.latent, torch.bfloat16)
        check_attention(make_backend(name, device), latent, device)
