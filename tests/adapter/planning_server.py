"""What the scheduler has of ours, over a stand-in for SGLang's tree: requests are received, planned and published."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_pic.adapter.serve.auditor import Auditor
from sglang_pic.adapter.serve.publication import Publication
from sglang_pic.adapter.serve.scheduler import receive
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.config import PicConfig
from sglang_pic.core import ContentIndex, CoreConfig
from tests.adapter.builders import make_planning, request

# Another beginning is no changed field here, so that lanes are all that a test sees.
BASE = {"tail_tokens": 0, "seam_tokens": 0, "min_spliced_tokens": 8, "max_field_tokens": 0}


class Tree:
    """A tree that holds every row that was published, with the locks on it."""

    page_size = 1

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.locks: list[object] = []

    def match_prefix(self, params: Any) -> Any:
        self.asked.append(params.key.extra_key)
        return SimpleNamespace(last_device_node=len(params.key), device_prefix_len=len(params.key))

    def path_device_indices(self, node: int) -> torch.Tensor:
        return torch.arange(node)

    def lock(self, node: int) -> object:
        self.locks.append(receipt := object())
        return receipt

    def unlock(self, receipt: object) -> None:
        self.locks.remove(receipt)


class Server:
    """What the scheduler has of ours, without SGLang's."""

    def __init__(self, **core: Any) -> None:
        self.config = PicConfig(core=CoreConfig(**{**BASE, **core}))
        self.index, self.tree = ContentIndex(self.config.core), Tree()
        self.planning = make_planning(self.index, self.config)
        self.publication = Publication(self.index, frozenset())

    def receive(self, tokens: list[int], pic: dict[str, Any] | None = None, **fields: Any) -> Any:
        req = request(tokens, pic or {}, **fields)
        receive(req, Auditor(), self.config.core)
        return req

    def plan(self, tokens: list[int], pic: dict[str, Any] | None = None, **fields: Any) -> Any:
        """A request as the scheduler gets it, with its plan."""
        self.planning.plan(req := self.receive(tokens, pic, **fields), self.tree, max_gaps=64)
        return req

    def serve(self, tokens: list[int], pic: dict[str, Any] | None = None, **fields: Any) -> int:
        """Serve a request to its end; how many tokens of it were spliced."""
        req = self.plan(tokens, pic, **fields)
        state: RequestState = req.pic
        num_locked = len(self.tree.locks)
        plan = state.admit(0, len(tokens), first_chunk=True)
        spliced = 0 if plan is None else plan.num_spliced
        assert num_locked == len({run.donor for run in plan.runs} if plan else ()), "what is not spliced is not locked"
        self.publication.publish(req, len(tokens), adopted_from=0)
        state.release_row()
        assert self.tree.locks == []
        return spliced
