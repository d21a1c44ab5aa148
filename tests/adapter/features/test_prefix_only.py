"""A server whose model cannot be spliced gets SGLang's own cache, and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pic.adapter import server_info
from sglang_pic.adapter.features import prefix_only
from sglang_pic.adapter.serve.modes import Cause, Modes
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.config import PicConfig


@pytest.mark.feature("recurrent state", "rows of several positions")
def test_sglangs_own_cache_is_served_and_requests_count_as_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hooks: dict[str, Callable[..., Any]] = {}
    for module in (prefix_only, server_info):
        monkeypatch.setattr(module, "hook", lambda _, name, function: hooks.__setitem__(name, function))
    monkeypatch.setattr(prefix_only, "apply_hooks", lambda: None)
    monkeypatch.setattr(prefix_only, "get_parallel", lambda: SimpleNamespace(dp_rank=3))
    monkeypatch.setattr(prefix_only, "default_radix_cache_factory", lambda ctx: ("stock", ctx))
    ctx: Any = SimpleNamespace(tp_rank=0)
    config = PicConfig(checkpoints=False)
    with caplog.at_level(logging.INFO):
        cache = prefix_only.create_cache(ctx, config, "a reason", Modes(config, Mode.OFF), None)
    assert cache == ("stock", ctx)
    assert caplog.messages == ["sglang_pic: prefix only, served by SGLang's own cache: a reason"]
    req = SimpleNamespace(extra_key="key", sampling_params=SimpleNamespace(custom_params={"pic": {"mode": "auto"}}))
    hooks["Req.__init__"](None, req)
    assert vars(req).keys() == {"extra_key", "sampling_params"}, "a request is SGLang's alone"
    shown = SimpleNamespace(internal_state={})
    hooks["SchedulerInternalStateController.get_internal_state"](shown, None, None)
    entry = shown.internal_state["pic"]
    assert "checkpoints" not in entry
    assert (entry["dp_rank"], entry["prefix_only"], entry["modes"]["mode"]) == (3, {"reason": "a reason"}, "off")
    assert entry["modes"]["num_off"] == {cause.value: int(cause is Cause.PREFIX_ONLY) for cause in Cause}
