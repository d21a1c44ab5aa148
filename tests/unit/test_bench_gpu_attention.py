"""The attention backend of the prefill benchmark that needs a GPU, interpreted."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pic_bench.gpu.attention_triton import compile_for, tile_queries
from pic_bench.gpu.model import MODELS
from triton.backends.compiler import GPUTarget

# A process of its own: Triton reads the variable when it is imported, for its own library too.
INTERPRETED = """
import torch
from pic_bench.gpu.model import AttentionShape
from pic_bench.gpu.attention_triton import TRITON
from pic_bench.gpu.model_check import check_attention
from sglang_pic.errors import UnsupportedError
torch.set_num_threads(1)
grouped, latent, expanded = (8, 2, 16, 16, 0, 0.25), (4, 1, 48, 32, 32, 0.2), (4, 4, 32, 16, 0, 0.2)
for shape in grouped, latent, expanded, (6, 2, 16, 16, 0, 0.25):
    try:
        print(check_attention(TRITON, AttentionShape(*shape, torch.float32), torch.device("cpu")))
    except UnsupportedError as error:
        print(error)
"""


def test_triton_attends_as_float32_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    *errors, refusal = done.stdout.splitlines()
    assert len(errors) == 3
    assert all(float(error) < 1e-6 for error in errors)
    assert "must be powers of two" in refusal


@pytest.mark.parametrize("block", [1, 4, 32])
def test_tiles_cover_every_query_once(block: int) -> None:
    tiles = tile_queries([0, 40, 64], [33, 41, 214], block)
    covered = [(first + i, position + i) for first, count, position in tiles.tolist() for i in range(count)]
    positions = [*range(33), 40, *range(64, 214)]
    assert sorted(covered) == list(enumerate(positions))
    assert np.all(tiles[:, 1] <= block)
    assert np.all(np.diff(tiles[:, 2]) <= 0)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "DeepSeek-V2-Lite"])
def test_it_compiles_for_hopper_within_its_shared_memory(model: str) -> None:
    """A Hopper program may have 227 KiB."""
    for shape in MODELS[model].attentions(torch.bfloat16):
        compiled = compile_for(shape, GPUTarget("cuda", 90, 32))
        assert 0 < compiled.metadata.shared <= 227 * 1024
