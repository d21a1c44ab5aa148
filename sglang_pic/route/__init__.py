"""Many servers: which chunks each of them can splice, and which server gets a prompt; neither torch nor SGLang."""

from __future__ import annotations

from sglang_pic.route.balancer import Route
from sglang_pic.route.sketch import Sketched, cut

__all__ = ["Route", "Sketched", "cut"]
