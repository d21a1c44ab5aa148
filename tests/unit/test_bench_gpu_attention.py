"""The attention backend of the prefill benchmark that needs a GPU, interpreted."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from pic_bench.gpu.model import MODELS, AttentionShape
from pic_bench.gpu.model_check import check_attention

from sglang_pic.errors import UnsupportedError

CPU = torch.device("cpu")
GROUPED = AttentionShape(8, 2, 16, 16, 0, 0.25, torch.float32)
LATENT = AttentionShape(4, 1, 48, 32, 32, 0.2, torch.float32)
EXPANDED = AttentionShape(4, 4, 32, 16, 0, 0.2, torch.float32)


# A process of its own: Triton reads the variable when it is imported, for its own library too.
INTERPRETED = """
import torch
from pic_bench.gpu.model import AttentionShape
from pic_bench.gpu.attention_triton import TRITON
from pic_bench.gpu.model_check import check_attention
from sglang_pic.errors import UnsupportedError
torch.set_num_threads(1)
for numbers in {shapes!r}:
    print(check_attention(TRITON, AttentionShape(*numbers, torch.float32), torch.device("cpu")))
try:
    check_attention(TRITON, AttentionShape(6, 2, 16, 16, 0, 0.25, torch.float32), torch.device("cpu"))
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
    from pic_bench.gpu.attention_triton import tile_queries

    tiles = tile_queries([0, 40, 64], [33, 41, 214], block)
    covered = [(first + i, position + i) for first, count, position in tiles.tolist() for i in range(count)]
    positions = [*range(33), 40, *range(64, 214)]
    assert sorted(covered) == list(enumerate(positions))
    assert np.all(tiles[:, 1] <= block)
    assert np.all(np.diff(tiles[:, 2]) <= 0)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "DeepSeek-V2-Lite"])
def test_it_compiles_for_hopper_within_its_shared_memory(model: str) -> None:
    """A Hopper program may have 227 KiB."""
    pytest.importorskip("triton")
    from pic_bench.gpu.attention_triton import compile_for
    from triton.backends.compiler import GPUTarget

    for shape in MODELS[model].attentions(torch.bfloat16):
        compiled = compile_for(shape, GPUTarget("cuda", 90, 32))
        assert 0 < compiled.metadata.shared <= 227 * 1024


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why() -> None:
    pytest.importorskip("triton")
    from pic_bench.gpu.attention_triton import TRITON

    with pytest.raises(UnsupportedError, match="attention backend triton: needs a GPU"):
        check_attention(TRITON, GROUPED, CPU)
