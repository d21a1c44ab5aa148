"""What the platform puts in the place of SGLang's operators of speculative decoding, and what it refuses."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest

from sglang_pic.adapter.contract import BUILT_FOR, installed_version
from sglang_pic.errors import UnsupportedError
from sglang_pic.platform import speculation


@pytest.mark.skipif(installed_version() != BUILT_FOR, reason="other versions may refuse servers with a draft")
def test_every_operator_that_is_replaced_is_there() -> None:
    missing = [
        f"{module}.{name}"
        for module, functions in speculation._REPLACED.items()
        for name in functions
        if not hasattr(import_module(module), name)
    ]
    assert missing == []


def test_what_needs_a_kernel_is_refused_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is replaced."""
    flag = "speculative_use_rejection_sampling"
    flags = SimpleNamespace(**{flag: True})
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: flags)
    monkeypatch.setattr(speculation, "_REPLACED", {"no.such.module": {}})
    with pytest.raises(UnsupportedError, match=rf"^--{flag.replace('_', '-')} does not work .*; remove it\.$"):
        speculation.install()
