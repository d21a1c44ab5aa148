"""Builders of what the adapter meets in a server: requests, plans, metrics and hooks."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pic.adapter.metrics import Metric, Series
from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.adapter.serve.state import PendingSplice, RequestState
from sglang_pic.core import Path, Plan, Run, as_tokens

DONOR = Path("donor", [as_tokens(range(4000))])

TRANSLATOR = SimpleNamespace(own_plan=lambda _: SimpleNamespace(bind=lambda *_: None))
"""SGLang's `KVIndexTranslator` of a runner whose slots are rows of its pool."""


def request(tokens: Iterable[int] = range(300), asked: object = None, **fields: Any) -> Any:
    """SGLang's request as far as the adapter reads it, before anything of it is computed.

    Args:
        tokens: of the prompt.
        asked: what a client put under `pic`.
        fields: what is otherwise on this request.
    """
    ids = array("q", tokens)
    unset = ("input_embeds", "positional_embed_overrides", "multimodal_inputs", "lora_id", "session", "extra_key")
    unset += ("multi_item_delimiter_indices", "token_indices_to_pool", "cache_salt", "finished_reason")
    plain: dict[str, Any] = {
        **dict.fromkeys(unset),
        **{"origin_input_ids": ids, "full_untruncated_fill_ids": ids, "output_ids": [], "cached_tokens": 0},
        **{"prefix_len": 0, "extend_end": len(ids), "retracted_stain": False, "return_hidden_states": False},
        **{"return_logprob": False, "logprob_start_len": -1, "rid": "r", "pic": RequestState(RequestOptions())},
        "sampling_params": SimpleNamespace(custom_params=None if asked is None else {"pic": asked}),
    }
    return SimpleNamespace(**{**plain, **fields})


def plan(prefix_len: int, end: int, *runs: tuple[int, int, int]) -> Plan:
    """A plan with runs `(target_start, target_end, shift)`."""
    taken = (Run(target_start=a, target_end=b, donor_start=a - s, donor=DONOR, seam_len=0) for a, b, s in runs)
    return Plan(prefix_len=prefix_len, end=end, runs=tuple(taken))


def splice(prefix_len: int, end: int, *runs: tuple[int, int, int], slots: int = 900) -> PendingSplice:
    """Such a plan on its way to the pass; the row for position `p` is read from slot `slots + p`."""
    sources = [torch.arange(slots + start, slots + end) for start, end, _ in runs]
    return PendingSplice(plan(prefix_len, end, *runs), sources)


class Kept(Series):
    """Keeps what is counted and set instead of exporting it, by metric and by label."""

    def __init__(self) -> None:
        super().__init__((), None)
        self.counts: Counter[tuple[str, str | None]] = Counter()
        self.levels: defaultdict[tuple[str, str | None], list[float]] = defaultdict(list)

    def add(self, metric: Metric, amount: float = 1, *, value: str | None = None) -> None:
        assert value is None or value in metric.values
        self.counts[metric.name, value] += int(amount)

    def set(self, metric: Metric, amount: float, *, value: str | None = None) -> None:
        self.levels[metric.name, value].append(amount)

    def by_label(self, metric: Metric) -> dict[str | None, int]:
        """What was counted of a metric, by its label."""
        return {value: count for (name, value), count in self.counts.items() if name == metric.name and count}

    def level(self, metric: Metric, value: str | None = None) -> float:
        """What a metric was set to last."""
        return self.levels[metric.name, value][-1]


def hooks_of(patch: pytest.MonkeyPatch, *modules: ModuleType) -> dict[str, Callable[..., Any]]:
    """By the name of what they hook, the functions that these modules install from here on."""
    found: dict[str, Callable[..., Any]] = {}
    for module in modules:
        patch.setattr(module, "hook", lambda _, target, function: found.setdefault(target, function))
    return found
