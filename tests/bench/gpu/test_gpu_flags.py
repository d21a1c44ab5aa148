"""The servers of `make gpu`: SGLang's own parser takes every flag, and dummy models are configured as it reads them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import pytest
from pic_bench import host
from pic_bench.gpu.checks import BACKENDS, FA3, PROBE
from pic_bench.gpu.latency import NO_PREFILL_GRAPHS
from pic_bench.gpu.record import Work
from pic_bench.gpu.servers import Model, dummy_model, make_arm
from pic_bench.gpu.variants import EAGLE, FP8, HOST, LORA, windows_model
from pic_bench.probe_plugin import PROBE_PLUGIN, PROBE_VARIABLE
from pic_bench.probe_plugin.options import load


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


def test_gpt_oss_has_windows_in_every_second_layer_and_its_own_dimensions(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(windows_model(Work(is_dry=False, folder=tmp_path)).folder)
    assert config.layer_types == ["sliding_attention", "full_attention"] * 4
    assert (config.hidden_size, config.head_dim, config.num_local_experts, config.sliding_window) == (2880, 64, 32, 128)
    assert config.rope_parameters["original_max_position_embeddings"] == 4_096


def test_both_arms_of_a_dummy_model_have_the_same_weights(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stock server loads the probe for its weights, and no cache of ours."""
    for arm in ("stock", "pic"):
        variables = make_arm(arm, models["Llama-3.1-8B"]).env
        monkeypatch.setenv(PROBE_VARIABLE, variables[PROBE_VARIABLE] or "")
        assert load().names_on == ["sharp_dummy"]
        if arm == "stock":
            names = (variables["SGLANG_PLUGINS"] or "").split(",")
            assert PROBE_PLUGIN in names
            assert "pic" not in names
    variables = make_arm("pic", models["Llama-3.1-8B"], probe=PROBE).env
    assert json.loads(variables[PROBE_VARIABLE] or "") == {**PROBE, "sharp_dummy": True}


def test_a_model_of_ones_own_keeps_its_weights(tmp_path: Path) -> None:
    model = dummy_model(Work(is_dry=False, folder=tmp_path, model="/mine"), "Llama-3.1-8B")
    assert (model.folder, model.flags, model.is_dummy) == (Path("/mine"), (), False)
    assert make_arm("pic", model).env[PROBE_VARIABLE] is None


def test_every_step_of_a_spliced_request_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MEASURED", {"32k, no hit": (1,), "32k, 8 runs": (2,)})
    assert host.main(["--requests", "2", "--chunks", "4000", "--out", str(tmp_path / "host.json")]) == 0
    result = msgspec.json.decode((tmp_path / "host.json").read_bytes(), type=host.HostResult)
    nothing, spliced = result.timings
    assert (nothing.num_runs, spliced.num_runs, spliced.case) == (0, 8, "32k, 8 runs of 2")
    assert nothing.steps["lay out"].p50_us == 0 < nothing.steps["plan"].p50_us
    assert [*spliced.steps] == [*host.STEPS]
    assert all(step.p50_us > 0 for step in spliced.steps.values())
