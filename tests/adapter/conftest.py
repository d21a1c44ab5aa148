"""What tests of passes that belong to no request share."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting tokens asks for process groups, which only a server has."""
    with warnings.catch_warnings():
        # SGLang and what it imports warn about this machine's missing accelerators.
        warnings.simplefilter("ignore")
        batch_info = pytest.importorskip("sglang.srt.model_executor.forward_batch_info")
    monkeypatch.setattr(batch_info, "enable_num_token_non_padded", lambda: False)
    monkeypatch.setattr("sglang_pic.adapter.probe.gathered.gathers", lambda: False)
