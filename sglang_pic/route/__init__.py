"""Many servers: what each of them holds, and where a prompt goes; neither torch nor SGLang."""

from __future__ import annotations

from sglang_pic.route.index import FleetIndex, Server
from sglang_pic.route.policy import Balancer, Route
from sglang_pic.route.sketch import Names, Sketched, cut, salted

__all__ = ["Balancer", "FleetIndex", "Names", "Route", "Server", "Sketched", "cut", "salted"]
