"""The servers that the tests share: starting one costs as much as hundreds of unit tests.

A test names its servers with `@on_servers` or `@on_each_server`. Tests of one server run side by side in one process,
and at most one shared server runs in a process. Each test begins with an empty cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_pic.nonces import NONCES
from tests.e2e import faults, plugins
from tests.e2e.serving import Client, serve

__all__ = ["AT_SHIFT_ZERO", "AUDITED", "SERVERS", "OneServer", "on_each_server", "on_servers"]


class SharedServer(NamedTuple):
    """How a server is started."""

    model: str
    args: tuple[str, ...]
    config: dict[str, Any]
    probe: dict[str, Any] | None
    """What of the benchmarks' probe plugin is on; `None` for a server as users run it."""
    env: Mapping[str, str] | None = None
    """Beyond this process's environment, made by `plugins`."""
    is_slow: bool = False
    """Its tests run on demand, as `slow`."""


_TAKE_EVERY_RUN = {"cost_gate": "off"}
AUDITED = {**_TAKE_EVERY_RUN, "audit_rate": 1.0}
_CHECKED = {"check_invariants": True}
AT_SHIFT_ZERO = {"ignore_prefix": True, **_CHECKED}
"""A prompt that is repeated is spliced from its own chunks at shift 0."""
# Three or four of the tests' prompts fill the pool, so that requests are retracted and rows are evicted.
_SMALL_POOL = (
    *("--max-total-tokens", "2600", "--max-running-requests", "6"),
    *("--enable-mixed-chunk", "--schedule-conservativeness", "0.1"),
)
# Adapters are loaded by the tests that want them.
_LORA = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8", "--max-loras-per-batch", "3"),
    *("--lora-target-modules", "q_proj", "k_proj", "v_proj"),
)
# Of SGLang's engines the one that a test fills: rows leave the device for the host all the time.
_HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "4")
_PRIORITY = (
    *("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "0"),
    *("--max-running-requests", "2"),
)
_DP_ATTENTION = ("--tp-size", "2", "--attn-dp-size", "2")
_DRAFT_OF_MTP = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)


def _float32(
    model: str,
    page_size: int,
    *args: str,
    config: dict[str, Any] = _TAKE_EVERY_RUN,
    probe: dict[str, Any] = AT_SHIFT_ZERO,
    env: Mapping[str, str] | None = None,
    is_slow: bool = False,
) -> SharedServer:
    """In float32, where a splice at shift 0 changes nothing, with prefill chunks that the tests' prompts exceed."""
    flags = ("--dtype", "float32", "--chunked-prefill-size", "192", "--page-size", str(page_size), *args)
    return SharedServer(model, flags, config, probe, env, is_slow)


def _on(backend: str, model: str, page_size: int, *args: str, is_slow: bool = False) -> SharedServer:
    """On SGLang's attention backend, over a reference kernel or in Triton's interpreter."""
    flags = (*args, "--attention-backend", backend)
    return _float32(model, page_size, *flags, env=plugins.PRODUCTION_BACKENDS, is_slow=is_slow)


# By name. Servers whose names begin with the same word are used by one process, one after the other in this order.
SERVERS = {
    # As users have it, but for its size.
    "text": SharedServer(
        "tiny-gqa",
        ("--enable-return-hidden-states", "--enable-streaming-session"),
        {**_TAKE_EVERY_RUN, "strip": [*NONCES]},
        None,
    ),
    "smollm2": SharedServer("smollm2", (), _TAKE_EVERY_RUN, None),
    "smollm2_as_users": SharedServer("smollm2", (), {}, None, env=plugins.AS_USERS_HAVE_IT, is_slow=True),
    "smollm2_probed": SharedServer(
        "smollm2", (), {**AUDITED, "self_test": "off"}, {"request_options": True}, is_slow=True
    ),
    "gqa_page16.small_pool": _float32(
        *("tiny-gqa", 16, *_SMALL_POOL, "--disable-overlap-schedule", "--enable-session-radix-cache"),
        config={**_TAKE_EVERY_RUN, "audit_rate": 0.0},
        probe=_CHECKED,
    ),
    "gqa_page16": _float32("tiny-gqa", 16, config=AUDITED, env=faults.ENVIRONMENT),
    "gqa_page16.attend": _float32(
        *("tiny-gqa", 16, "--chunked-prefill-size", "1024", "--max-running-requests", "4"),
        config={**AUDITED, "core": {"reordered": "attend"}},
        probe=_CHECKED,
        env=plugins.ANY_LAYERS,
    ),
    "gqa_page1.attend_tp2": _float32(
        *("tiny-gqa", 1, "--chunked-prefill-size", "1024", "--tp-size", "2"),
        config={**_TAKE_EVERY_RUN, "core": {"reordered": "attend"}},
        probe=_CHECKED,
        env=plugins.ANY_LAYERS,
        is_slow=True,
    ),
    "gqa_page16.attend_host": _float32(
        *("tiny-gqa", 16, "--chunked-prefill-size", "1024", "--max-total-tokens", "6000", *_HOST, *_LORA),
        config={**AUDITED, "core": {"reordered": "attend"}},
        probe=_CHECKED,
        env=plugins.ANY_LAYERS,
        is_slow=True,
    ),
    "gqa_page16.lora": _float32("tiny-gqa", 16, *_LORA, config=AUDITED, env=plugins.PAGEABLE, is_slow=True),
    "gqa_page16.fa3": _on("fa3", "tiny-gqa", 16, "--enable-deterministic-inference", is_slow=True),
    "gqa_page16.triton": _on("triton", "tiny-gqa", 16, is_slow=True),
    "gqa_page1.small_pool": _float32("tiny-gqa", 1, *_SMALL_POOL, *_HOST, config=AUDITED, probe=_CHECKED),
    "gqa_page64_fp8": _float32("tiny-gqa", 64, "--kv-cache-dtype", "fp8_e4m3", *_PRIORITY, is_slow=True),
    # No splice from another context is as close as this limit, so a model fails whose rows are moved rightly.
    "gqa_page1_tp2": _float32(
        *("tiny-gqa", 1, "--tp-size", "2"),
        config={**{**_TAKE_EVERY_RUN, "self_test": "warn", "self_test_key_limit": 1e-9}, "certificate": "lost.json"},
    ),
    "mla_page1": _float32("tiny-mla", 1, is_slow=True),
    "mla_page1.fa3": _on("fa3", "tiny-mla", 1, "--dp-size", "2", is_slow=True),
    "mla_page1_dp2": _float32("tiny-mla", 1, *_DP_ATTENTION, config=AUDITED, env=faults.ENVIRONMENT, is_slow=True),
    "mtp_page1_dp2": _float32(
        *("tiny-mtp", 1, *_DP_ATTENTION, *_DRAFT_OF_MTP), config=AUDITED, env=faults.ENVIRONMENT, is_slow=True
    ),
    "mtp_page1_dp2.host": _float32(
        *("tiny-mtp", 1, *_DP_ATTENTION, *_DRAFT_OF_MTP, "--max-total-tokens", "6000", *_HOST), is_slow=True
    ),
    "mla_page16_tp2": _float32(
        *("tiny-mla", 16, "--tp-size", "2", "--max-total-tokens", "6000", *_HOST), env=faults.ENVIRONMENT
    ),
    # Queries attend to 64 tokens; SGLang sets the page size.
    "dsa_page64": _float32("tiny-dsa", 64, config=AUDITED, env=faults.ENVIRONMENT, is_slow=True),
    # Each rank gets half of a prefill chunk, which must be whole pages.
    "dsa_page64.dp2": _float32("tiny-dsa", 64, *_DP_ATTENTION, "--chunked-prefill-size", "256", is_slow=True),
    "dsa_page64.host": _float32("tiny-dsa", 64, "--max-total-tokens", "3072", *_HOST, is_slow=True),
    "dsa_page64.tp2": _float32("tiny-dsa", 64, "--tp-size", "2", is_slow=True),
    # With every commit their models run without a server: test_images_spliced.py, test_window_rows.py.
    "qwen_vl_page1": _float32("tiny-qwen2.5-vl", 1, config=AUDITED, is_slow=True),
    "qwen_vl_page1.host": _float32("tiny-qwen2.5-vl", 1, "--max-total-tokens", "3072", *_HOST, is_slow=True),
    "qwen_vl_page64.host": _float32("tiny-qwen2.5-vl", 64, "--max-total-tokens", "3072", *_HOST, is_slow=True),
    "gemma3_page1": _float32("tiny-gemma3", 1, is_slow=True),
    "gpt_oss_page16": _float32("tiny-gpt-oss", 16, is_slow=True),
    "llama4_page16": _float32("tiny-llama4", 16, is_slow=True),
    "minimax_page16": _float32("tiny-minimax", 16, is_slow=True),
    "minimax_page16.host": _float32("tiny-minimax", 16, "--max-total-tokens", "3072", *_HOST, is_slow=True),
    "minimax_page64.host": _float32("tiny-minimax", 64, "--max-total-tokens", "3072", *_HOST, is_slow=True),
    # Layers with recurrent state: SGLang's own cache, with six states beside those of three running requests.
    "qwen3_next": SharedServer(
        "tiny-qwen3-next",
        (
            *("--dtype", "float32", "--mamba-radix-cache-strategy", "extra_buffer", "--chunked-prefill-size", "1024"),
            *("--max-mamba-cache-size", "15", "--max-running-requests", "3"),
        ),
        {},
        None,
    ),
    "gpt_oss_page16.host": _float32(
        *("tiny-gpt-oss", 16, "--max-total-tokens", "4096", "--swa-full-tokens-ratio", "0.5", *_HOST), is_slow=True
    ),
    "gpt_oss_page64.host": _float32(
        *("tiny-gpt-oss", 64, "--max-total-tokens", "4096", "--swa-full-tokens-ratio", "0.5", *_HOST), is_slow=True
    ),
    # One request that decodes, one prompt in chunks and its donors fill the pool.
    "gpt_oss_page16.full_pool": _float32(
        *("tiny-gpt-oss", 16, "--max-total-tokens", "1104", "--swa-full-tokens-ratio", "1"),
        *("--chunked-prefill-size", "64"),
        config={**_TAKE_EVERY_RUN, "audit_rate": 0.0, "core": {"preset": "most"}},
        probe=_CHECKED,
        is_slow=True,
    ),
    # Windows have half as many slots as the other layers, and room for an audit.
    "gpt_oss_page16.small_pool": _float32(
        *("tiny-gpt-oss", 16, *_SMALL_POOL, "--max-total-tokens", "5200", "--swa-full-tokens-ratio", "0.5"),
        config=AUDITED,
        probe={"request_options": True, **_CHECKED},
        is_slow=True,
    ),
}


def on_servers(*names: str) -> pytest.MarkDecorator:
    """Runs a test once, with the named servers of `SERVERS` at hand."""
    return pytest.mark.parametrize("servers", [_named(*names)], indirect=True)


def on_each_server(*names: str | tuple[str, ...]) -> pytest.MarkDecorator:
    """Runs a test once for each of the named servers, or for each group of servers."""
    groups = [_named(name) if isinstance(name, str) else _named(*name) for name in names]
    return pytest.mark.parametrize("servers", groups, indirect=True)


def _named(*names: str) -> Any:
    assert set(names) <= set(SERVERS), names
    marks = [pytest.mark.slow] if any(SERVERS[name].is_slow for name in names) else []
    return pytest.param(names, id="@" + "+".join(names), marks=marks)


class OneServer:
    """The shared server that runs in this process, if one does."""

    def __init__(self, model_dir: Callable[[str], Path], log_dir: Path) -> None:
        self._model_dir = model_dir
        self._log_dir = log_dir
        self._running = ExitStack()
        self._name: str | None = None
        self._client: Client | None = None

    def client(self, name: str) -> Client:
        """The server of that name, started unless it runs; another one that runs is stopped first."""
        if self._client is None or self._name != name:
            self.stop()
            spec = SERVERS[name]
            self._client = self._running.enter_context(
                serve(
                    self._model_dir(spec.model),
                    self._log_dir,
                    *spec.args,
                    config=spec.config,
                    probe=spec.probe,
                    env=spec.env,
                    injected=faults.STAGES.values() if spec.env is faults.ENVIRONMENT else (),
                )
            )
            self._name = name
        return self._client

    def stop_unless(self, wanted: Collection[str]) -> None:
        """End the server if it is none of those that are wanted next."""
        if self._name not in wanted:
            self.stop()

    def stop(self) -> None:
        """End the server; raises `BenchError` if it has ended by itself."""
        self._client = self._name = None
        self._running.close()
