"""What is refused when a server starts, in one line, and the matrix that the reference page shows."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt import server_args
from sglang.srt.environ import envs
from sglang.srt.mem_cache import registry
from torch import nn

import sglang_pic
from sglang_pic.adapter.features import images
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.media import TextOnly
from sglang_pic.adapter.sglang.contract import BUILT_FOR, FEATURES, Symbol
from sglang_pic.adapter.support import (
    SUPPORT,
    Level,
    Support,
    always_computed,
    check_features,
    check_support,
    prefix_only,
)
from sglang_pic.config import CONFIG_VARIABLE
from sglang_pic.errors import ContractError, UnsupportedError

PACKAGE = Path(sglang_pic.__file__).parent
SERVED = [entry for entry in SUPPORT if entry.path and entry.level not in (Level.FALLS_BACK, Level.REFUSED)]
COMPUTED = [entry for entry in SUPPORT if entry.path and entry.level is Level.FALLS_BACK]
REFUSALS = [
    entry
    for entry in SUPPORT
    if entry.path and entry.level is Level.REFUSED and not entry.path.startswith(("environ.", "config."))
]


def other(served: object) -> object:
    """A value that is refused."""
    if isinstance(served, list):
        return "DFLASH"
    return not served if isinstance(served, bool) else {1: 2, "null": "prefill"}[served]  # type: ignore[index]


def context(backend: str = "triton") -> Any:
    """SGLang's `TreeCacheBuildContext` of a server that is served, as far as it is read."""
    ctx = SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_mode="null", attn_dp_size=1, enable_lora=False, lora_paths=None),
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=SimpleNamespace(size=48))),
    )
    for entry in (*COMPUTED, *SERVED, *REFUSALS):
        for path in entry.path.split():
            put(ctx, path, entry.served[0] if isinstance(entry.served, list) else entry.served)
        for path in entry.beside.split():
            if not path.startswith("config."):
                put(ctx, path, False)
    ctx.tp_worker.model_runner.prefill_attention_backend_str = backend
    return ctx


def put(ctx: Any, path: str, value: object) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        ctx = getattr(ctx, parent)
    setattr(ctx, name, value)


@pytest.mark.feature(
    "recurrent state", "rows of several positions", "embeddings of n-grams", "sliding windows in all layers"
)
@pytest.mark.parametrize("entry", [entry for entry in SUPPORT if entry.level is Level.PREFIX_ONLY], ids=str)
def test_a_server_with_sglangs_own_cache_is_refused_nothing(entry: Support) -> None:
    """What stock SGLang serves without the flag starts with it."""
    ctx = context("no such backend")
    for refusal in REFUSALS:
        if not refusal.beside:
            put(ctx, refusal.path.split()[0], refusal.values[0] if refusal.values else other(refusal.served))
    assert prefix_only(ctx) == ""
    with pytest.raises(UnsupportedError):
        check_support(ctx)
    put(ctx, entry.path, entry.values[0] if entry.values else True)
    check_support(ctx)
    assert prefix_only(ctx) == f"{entry.what}: {entry.reason}"


@pytest.mark.feature(
    "images with a store of HiCache or PD disaggregation",
    "images with DP attention",
    "images with --moe-a2a-backend or --moe-dense-tp-size",
    "images on untested models",
)
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("server_args.hicache_storage_backend", "file"),
        ("server_args.disaggregation_mode", "prefill"),
        ("server_args.attn_dp_size", 2),
        ("server_args.moe_a2a_backend", "deepep"),
        ("server_args.moe_dense_tp_size", 1),
        ("model_config.hf_config.architectures", ["Qwen2AudioForConditionalGeneration"]),
    ],
)
def test_images_are_moved_where_no_entry_of_the_table_says_otherwise(
    path: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = context()
    ctx.model_config.is_multimodal, ctx.model_config.model_is_mrope = True, True
    ctx.model_config.hf_config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    assert isinstance(images.make(ctx), images.Images)
    put(ctx, path, value)
    with caplog.at_level("INFO"):
        assert type(images.make(ctx)) is TextOnly
    assert "All requests with media are computed" in caplog.text
    ctx.model_config.is_multimodal = False
    assert always_computed(ctx, Fallback.MEDIA) == ""


@pytest.mark.parametrize("has_mrope", [False, True])
def test_images_are_moved_beside_drafts_that_rotate_by_the_same_positions(has_mrope: bool) -> None:
    ctx, inner = context(), nn.Module()
    inner.is_mrope_enabled = has_mrope
    ctx.model_config.is_multimodal, ctx.model_config.model_is_mrope = True, True
    ctx.model_config.hf_config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    drafts = [nn.Sequential(inner)]
    assert isinstance(images.make(ctx, drafts), images.Images) == has_mrope
    # Without M-RoPE there are as many positions as tokens.
    ctx.model_config.model_is_mrope = False
    assert isinstance(images.make(ctx, drafts), images.Images)


@pytest.mark.feature("PD disaggregation")
def test_a_decode_server_is_refused_only_what_takes_its_rows_elsewhere() -> None:
    """It splices nothing, and has no tree unless it is asked for."""
    ctx = context("trtllm_mla")
    ctx.server_args.disaggregation_mode = "decode"
    for refusal in REFUSALS:
        if "decode" not in refusal.modes:
            put(ctx, refusal.path.split()[0], refusal.values[0] if refusal.values else other(refusal.served))
    check_support(ctx)
    for refusal in REFUSALS:
        if "decode" in refusal.modes:
            put(ctx, refusal.path, other(refusal.served))
            with pytest.raises(UnsupportedError, match=f"with {refusal.what}"):
                check_support(ctx)
            put(ctx, refusal.path, refusal.served)


@pytest.mark.parametrize(
    ("feature", "path", "value", "what"),
    [
        ("disaggregation", "disaggregation_mode", "prefill", "PD disaggregation"),
        ("disaggregation", "disaggregation_mode", "decode", "PD disaggregation"),
        ("gathering", "attn_dp_size", 2, "DP attention"),
        ("gathering", "moe_a2a_backend", "deepep", "--moe-a2a-backend or --moe-dense-tp-size"),
        ("lora", "enable_lora", True, "LoRA adapters"),
        ("draft", "speculative_algorithm", "EAGLE", "speculative decoding"),
        ("draft", "speculative_algorithm", "EAGLE3", "speculative decoding"),
    ],
)
def test_what_only_a_feature_relies_on_stops_only_servers_with_it(
    feature: str, path: str, value: object, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FEATURES:
        missing = (Symbol("sglang.srt.gone.Gone", why="a test"),) if name == feature else ()
        monkeypatch.setitem(FEATURES, name, missing)
    ctx = context()
    assert check_features(ctx) == []
    put(ctx, f"server_args.{path}", value)
    check_support(ctx)
    with pytest.raises(ContractError, match=rf"Gone is missing .*sglang=={BUILT_FOR}, or start without {what}\.$"):
        check_features(ctx)


@pytest.mark.feature("PD disaggregation")
def test_a_decode_server_needs_nothing_of_what_splices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEATURES, "draft", (Symbol("sglang.srt.gone.Gone", why="a test"),))
    monkeypatch.setitem(FEATURES, "disaggregation", ())
    ctx = context()
    ctx.server_args.disaggregation_mode, ctx.server_args.speculative_algorithm = "decode", "EAGLE"
    assert check_features(ctx) == []


@pytest.mark.feature("trtllm_mla")
@pytest.mark.parametrize(
    ("backend", "way_out"),
    [
        ("flex", r"; choose one of pic_cpu, fa3, flashinfer, triton, .* with --attention-backend\.$"),
        # What SGLang chooses on Blackwell for DeepSeek-V3.
        ("trtllm_mla", r"; start with --prefill-attention-backend flashinfer, and --decode-attention-backend .*\.$"),
    ],
)
def test_a_backend_that_is_refused_comes_with_the_flag_that_helps(backend: str, way_out: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"the prefill attention backend '{backend}': .*{way_out}"):
        check_support(context(backend))


ELSEWHERE = {
    "adapter/doctor/cards.py": "doctor itself",
    "adapter/doctor/model_folder.py": "doctor itself",
    "adapter/doctor/server.py": "doctor itself",
    "adapter/startup/drafts.py": "the live draft, whose attention backend and pools the tables judge",
    "adapter/features/hicache/drafts_on_host.py": "which of the live heads SGLang keeps on the host",
    "adapter/probe/ranks.py": "what the ranks read of their files",
    "adapter/startup/self_test.py": "answers of the live model",
    "adapter/support.py": "the table of refusals",
    "runtime/checks/gap_rows.py": "rows of the live model",
    "runtime/checks/moved_rows.py": "rows of the live model",
    "runtime/fetch.py": "whether the live host pool has a kernel",
    "runtime/host_rows.py": "the live host pool, by KNOWN_HOST_POOLS and LAYOUTS",
    "runtime/index_keys.py": "the live pools of index keys",
    "runtime/live_pools.py": "the live KV pool, by its class",
    "runtime/rope.py": "the live rotary modules, by KNOWN_EMBEDDINGS and its neighbours; doctor asks for lengths",
    "runtime/splice.py": "whether the live pools and rotations fit",
    "runtime/views.py": "the live KV pool, by KNOWN_POOLS, REFUSED_POOLS and PLAIN_LAYOUT",
    "runtime/window_pool.py": "the live pool for windows",
}


def test_only_the_table_and_checks_of_what_is_live_refuse_a_server() -> None:
    """What doctor could know without the live model belongs in the table, which it asks."""
    raising = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found = node.exc if isinstance(node, ast.Raise) else None
            if "UnsupportedError" in ("" if found is None else ast.unparse(found)):
                raising.add(str(path.relative_to(PACKAGE)))
    assert raising | {"runtime/rope.py"} == set(ELSEWHERE), "`_unsupported` of rope.py makes what it raises"


def test_every_refused_flag_is_sglangs_and_off_by_default() -> None:
    """A flag that SGLang renames must not be admitted silently."""
    args = {field.name: field for field in msgspec.structs.fields(server_args.ServerArgs)}
    build = {field.name for field in dataclasses.fields(registry.TreeCacheBuildContext)}
    for refusal in REFUSALS:
        parent, _, name = refusal.path.rpartition(".")
        if parent == "server_args":
            default, served = args[name].default, refusal.served
            if refusal.values:
                assert default not in refusal.values, name
                continue
            assert (default or "") in served if isinstance(served, list) else (default or False) == served, name
        elif not parent:
            assert name in build


def test_variables_that_refusals_name_are_sglangs() -> None:
    named = {name for entry in SUPPORT for name in re.findall(r"SGLANG_\w+", f"{entry.what} {entry.change}")}
    assert {name for name in named - {CONFIG_VARIABLE} if not hasattr(envs, name)} == set()
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING" in named


def test_the_matrix_says_everything_once_and_what_to_change() -> None:
    """But of what is not ours: the contract names a symbol, SGLang refuses the others by itself."""
    named = [(entry.area, entry.what) for entry in SUPPORT]
    assert len(set(named)) == len(named)
    assert {entry.level for entry in SUPPORT} == set(Level)
    assert all(entry.reason for entry in SUPPORT)
    without = {entry.what for entry in SUPPORT if entry.level is Level.REFUSED and not entry.change}
    assert without == {"a version with other symbols", "input embeddings"}
