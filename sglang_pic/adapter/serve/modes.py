"""Which requests may be spliced: the operator's settings, and the switch of a running server."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from enum import Enum
from typing import Final

import msgspec

from sglang_pic.adapter import server_info
from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.config import PicConfig

logger = logging.getLogger(__name__)

SWITCH_KEY: Final = "pic_mode"
"""The key of `/set_internal_state`, which takes numbers only: 0 for `off`, 1 for `auto`."""

MODE_OFF: Final = Metric(
    "sglang:pic_mode_off", MetricKind.GAUGE, "1 while an operator has switched splicing off on this server, else 0."
)
METRICS: Final = (MODE_OFF,)


class Cause(Enum):
    """Why a request is served with mode `off`."""

    REQUEST = "request"
    """Its own option."""
    REQUIRE_SALT = "require_salt"
    OPT_OUT = "opt_out"
    MODE = "mode"
    SHARE = "share"
    PREFIX_ONLY = "prefix_only"
    """The server has SGLang's own cache."""


class ModeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `/server_info` on modes; keys and salts are not shown."""

    is_on: bool
    """False while an operator has switched splicing off."""
    mode: Mode
    share: float
    require_salt: bool
    num_opted_in: int
    """Entries of `opt_in`."""
    num_opted_out: int
    num_off: dict[str, int]
    """Requests that were served with mode `off`, by cause."""


class Modes:
    """The modes of one scheduler rank; every rank decides alike.

    Args:
        config: the operator's settings.
        mode: the default mode of requests, if it is not the configuration's.
        series: exports `METRICS`.
    """

    def __init__(self, config: PicConfig | None = None, mode: Mode | None = None, series: Series | None = None) -> None:
        self._config, self._series = config or PicConfig(), series or Series((), None)
        self._mode = mode or Mode(self._config.mode)
        self._opt_in, self._opt_out = frozenset(self._config.opt_in), frozenset(self._config.opt_out)
        self._num_off: Counter[Cause] = Counter()
        self.is_on = True
        """False while an operator has switched splicing off."""

    def decide(self, req: Req, asked: Mode | None) -> Mode:
        """The mode of a request with the option `asked`; settings that exclude it come before those that include it."""
        # SGLang appends the id of the request's adapter to the key.
        extra_key = (req.extra_key or "").removesuffix(req.lora_id or "")
        names = {name for name in (extra_key, req.cache_salt) if name}
        cause = None
        if asked is Mode.OFF:
            cause = Cause.REQUEST
        elif self._config.require_salt and not req.cache_salt:
            cause = Cause.REQUIRE_SALT
        elif names & self._opt_out:
            cause = Cause.OPT_OUT
        elif asked is None and not names & self._opt_in:
            if self._mode is Mode.OFF:
                cause = Cause.MODE
            elif self._config.share < 1 and not self._shares(_session_of(req, extra_key)):
                cause = Cause.SHARE
        if cause is None:
            return Mode.AUTO
        self.count_off(cause)
        return Mode.OFF

    def count_off(self, cause: Cause) -> None:
        """Count a request that is served with mode `off`."""
        self._num_off[cause] += 1

    def switch(self, mode: Mode) -> None:
        """Switch splicing off, or on again."""
        self.is_on = mode is Mode.AUTO
        self._series.set(MODE_OFF, int(not self.is_on))
        logger.warning(
            "sglang_pic: an operator has switched splicing %s (%s)", "on" if self.is_on else "off", SWITCH_KEY
        )

    def report(self) -> ModeReport:
        """The part of `/server_info`."""
        return ModeReport(
            is_on=self.is_on,
            mode=self._mode,
            share=self._config.share,
            require_salt=self._config.require_salt,
            num_opted_in=len(self._opt_in),
            num_opted_out=len(self._opt_out),
            num_off={cause.value: self._num_off[cause] for cause in Cause},
        )

    def install(self) -> None:
        """Register the hook by which `/set_internal_state`, sent to every rank, switches splicing."""

        def refuse(value: float) -> str:
            return "" if value in (0, 1) else "must be 0 (off) or 1 (auto)."

        server_info.take(SWITCH_KEY, refuse, lambda value: self.switch(Mode.AUTO if value else Mode.OFF))

    def _shares(self, session: str) -> bool:
        """Whether a session is among the `share`; a request without a session is not."""
        drawn = int.from_bytes(hashlib.blake2b(session.encode("utf8", "surrogatepass"), digest_size=8).digest())
        return bool(session) and drawn < self._config.share * 2**64


def _session_of(req: Req, extra_key: str) -> str:
    """The session of a request: its `session_id`, else its routing key, else its key and salt; may be empty."""
    return req.session_id or req.routing_key or "\x1f".join(filter(None, (extra_key, req.cache_salt)))
