"""Where environments made before the CPU platform moved to `sglang-pic-bench` look for it; `make setup` renews them."""

from __future__ import annotations

from pic_platform import activate

__all__ = ["activate"]
