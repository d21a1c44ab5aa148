"""What tests of the adapter share: an SGLang that is imported already, and passes that belong to no request."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest

if find_spec("sglang") is None:
    collect_ignore_glob = ["*test_*.py"]
else:
    with warnings.catch_warnings():
        # SGLang and what it imports warn about this machine's missing accelerators, and of each other.
        warnings.simplefilter("ignore")
        import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401
        import sglang.srt.models.deepseek_v2  # noqa: F401
        import sglang.srt.speculative.eagle_worker_v2  # noqa: F401


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting tokens asks for process groups, which only a server has."""
    from sglang.srt.model_executor import forward_batch_info

    monkeypatch.setattr(forward_batch_info, "enable_num_token_non_padded", lambda: False)
    monkeypatch.setattr("sglang_pic.adapter.probe.gathered.gathers", lambda: False)
