"""Servers of models whose prompts cannot be spliced: SGLang's own cache, so that one flag serves a whole fleet.

Such a server computes what a stock server does, and keeps the same but for the places of recurrent states
(`state_checkpoints.py`). Options of requests are checked as on every server and count as mode `off`; nothing is added
to the keys of their rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from sglang.srt.mem_cache.registry import default_radix_cache_factory
from sglang.srt.runtime_context import get_parallel

from sglang_pic.adapter import server_info
from sglang_pic.adapter.features import state_checkpoints
from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.serve.account import FALLBACKS
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.modes import Cause, Modes
from sglang_pic.adapter.sglang.hooks import apply_hooks, hook
from sglang_pic.adapter.sglang.seams import BuildContext
from sglang_pic.config import PicConfig

logger = logging.getLogger(__name__)


class PrefixOnlyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `/server_info` that only servers without splices have."""

    reason: str


def create_cache(
    ctx: BuildContext, config: PicConfig, reason: str, modes: Modes, labels: Mapping[str, str] | None
) -> Any:
    """The cache that SGLang makes for this server without `--radix-cache-backend`, because of `reason`.

    `modes` count the requests; their switch changes nothing here.

    Raises:
        ContractError: a function of SGLang could not be hooked.
    """
    series, report = Series([FALLBACKS], labels), PrefixOnlyReport(reason=reason)

    def on_request(*_: object, **__: object) -> None:
        modes.count_off(Cause.PREFIX_ONLY)
        series.add(FALLBACKS, value=Fallback.OFF.value)

    hook(__name__, "Req.__init__", on_request)
    modes.install()
    reports: dict[str, Callable[[], msgspec.Struct]] = {"prefix_only": lambda: report, "modes": modes.report}
    if config.checkpoints:
        state_checkpoints.install(ctx, labels)
    server_info.install(config, reports, dict, get_parallel().dp_rank)
    apply_hooks()
    if ctx.tp_rank == 0:
        logger.info("sglang_pic: prefix only, served by SGLang's own cache: %s", reason)
    return default_radix_cache_factory(ctx)
