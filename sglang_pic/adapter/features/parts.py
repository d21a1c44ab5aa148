"""What the features of a server are made of."""

from __future__ import annotations

from typing import NamedTuple

from sglang_pic.adapter.serve.forward import ForwardPath
from sglang_pic.adapter.serve.stations import Stations
from sglang_pic.adapter.serve.tree import PicRadixCache
from sglang_pic.adapter.startup.live_model import LiveModel
from sglang_pic.core import CostModel


class Parts(NamedTuple):
    """The parts of one scheduler rank. `make(ctx, parts)` of a feature returns None on servers without it."""

    live: LiveModel
    cost: CostModel | None
    """Measured; None if the cost gate is off."""
    stations: Stations
    path: ForwardPath
    tree: PicRadixCache
