"""The servers of `make gpu`: SGLang's own parser takes every flag, and dummy models are configured as it reads them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from pic_bench.gpu.checks import BACKENDS, FA3
from pic_bench.gpu.latency import NO_PREFILL_GRAPHS
from pic_bench.gpu.record import Work
from pic_bench.gpu.servers import Model, dummy_model, make_arm
from pic_bench.gpu.variants import EAGLE, FP8, HOST, LORA


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """SGLang's, of `sglang.launch_server`."""
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(made)
    return made


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Model]:
    work = Work(is_dry=False, folder=tmp_path)
    return {name: dummy_model(work, name) for name in ("Llama-3.1-8B", "DeepSeek-V2-Lite")}


@pytest.mark.parametrize(
    "flags", [(), FA3, *BACKENDS.values(), NO_PREFILL_GRAPHS, FP8, HOST, EAGLE, LORA], ids=" ".join
)
@pytest.mark.parametrize("arm", ["stock", "pic"])
def test_every_flag_is_one_of_sglangs(
    flags: tuple[str, ...], arm: str, parser: argparse.ArgumentParser, models: dict[str, Model]
) -> None:
    for model in models.values():
        args = parser.parse_args(["--model-path", str(model.folder), *make_arm(arm, model, flags).server_args])
        assert args.load_format == "dummy"
        assert args.radix_cache_backend == ("pic" if arm == "pic" else None)
        if "--attention-backend" in flags:
            assert args.attention_backend == flags[1]
    if flags == NO_PREFILL_GRAPHS:
        assert args.cuda_graph_config == {"prefill": {"backend": "disabled"}}


def test_configurations_are_read_by_transformers(models: dict[str, Model]) -> None:
    from transformers import AutoConfig

    llama, deepseek = (AutoConfig.from_pretrained(models[name].folder) for name in models)
    assert (llama.num_key_value_heads, llama.head_dim, llama.num_hidden_layers) == (8, 128, 32)
    assert (deepseek.kv_lora_rank, deepseek.qk_rope_head_dim, deepseek.n_routed_experts) == (512, 64, 64)
