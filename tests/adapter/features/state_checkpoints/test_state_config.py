"""The census reads states from a model's `config.json` as SGLang's own classes do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang.srt.arg_groups import overrides
from sglang.srt.configs import linear_attn_model_registry as registry
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_pic.census.state_config import NO_BUFFER_ARCHITECTURES, model_states


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "nemotron_h"},
        {"model_type": "nemotron_h", "chunk_size": 128},
        {"model_type": "nemotron_h", "chunk_size": 128, "mamba_chunk_size": 64},
        {"model_type": "mamba2", "chunk_size": 128},
        {"model_type": "granitemoehybrid", "mamba_chunk_size": 128},
        *({"model_type": kind} for kind in ("falcon_h1", "granitemoehybrid", "mamba2", "mamba", "falcon_mamba")),
        *({"model_type": kind} for kind in ("lfm2", "lfm2_moe", "lfm2_vl", "zaya", "llama")),
        *({"model_type": kind} for kind in ("qwen3_next", "qwen3_5_moe", "kimi_linear", "jet_nemotron", "glm5_next")),
    ],
    ids=str,
)
def test_the_chunk_is_sglangs(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    # As in `mamba_cache_chunk_size`.
    expected = getattr(get_config(str(tmp_path), trust_remote_code=False), "mamba_chunk_size", 64)
    assert model_states(tmp_path).mamba_chunk_size == expected


def test_models_without_extra_buffers_are_sglangs() -> None:
    named = overrides._MAMBA_RADIX_CACHE_ARCHS - overrides._MAMBA_EXTRA_BUFFER_ARCHS
    specs = [each for each in registry._LINEAR_ATTN_MODEL_REGISTRY if each.uses_mamba_radix_cache]
    assert all(each.arch_names for each in specs), "one that is found by its configuration has no place in the list"
    found = {name for each in specs if not each.support_mamba_cache_extra_buffer for name in each.arch_names}
    assert named | found == NO_BUFFER_ARCHITECTURES
