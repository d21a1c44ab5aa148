"""Which requests may be spliced: by the operator's settings and switch, and by what a request is."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from enum import Enum
from typing import Final

import msgspec

from sglang_pic.adapter import server_info
from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.namespace import MAX_KEY_LEN, Namespace
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.faults import Faults
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.media import TextOnly
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.serve.state import Judged, RequestState
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
    """The part of `/server_info` on modes."""

    is_on: bool
    """False while an operator has switched splicing off."""
    mode: Mode
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


class Eligibility:
    """Decides which requests of one scheduler rank reuse rows and donate their own."""

    def __init__(self, sink_tokens: int, media: TextOnly, modes: Modes, faults: Faults, features: Features) -> None:
        self._sink_tokens, self._media = sink_tokens, media
        self._modes, self._faults, self._features = modes, faults, features

    def refusal(self, req: Req) -> Fallback | None:
        """Why the request neither reuses nor donates, or `None`."""
        state: RequestState = req.pic
        if state.options.mode is Mode.OFF:
            return Fallback.OFF
        if self._faults.is_off or state.epoch.restarts != self._faults.num_restarts:
            return Fallback.FAULTS
        if (diversion := self.diversion(state)) is not None:
            return diversion
        if state.judged is None:
            state.judged = self._judge(req)
        return state.judged.refusal

    def _judge(self, req: Req) -> Judged:
        """Whether the request may reuse, by its own properties."""
        has_media, first_logprob = req.multimodal_inputs is not None, logprob_start(req)
        media = self._media.read(req) if has_media else None
        in_sink = min(self._sink_tokens + 1, len(req.origin_input_ids))
        named: Namespace = req.pic.namespace
        reasons = (
            (max(len(named.extra_key or ""), len(named.cache_salt or "")) > MAX_KEY_LEN, Fallback.KEY),
            (req.input_embeds is not None or req.positional_embed_overrides is not None, Fallback.EMBEDDINGS),
            (has_media and media is None, Fallback.MEDIA),
            (first_logprob is not None and first_logprob < in_sink, Fallback.INPUT_LOGPROBS),
            (req.return_hidden_states, Fallback.HIDDEN_STATES),
            (req.multi_item_delimiter_indices is not None, Fallback.SCORING),
            (req.token_indices_to_pool is not None, Fallback.SCORING),
            (req.session is not None, Fallback.SESSION),
        )
        return Judged(next((reason for holds, reason in reasons if holds), None), media)

    def diversion(self, state: RequestState) -> Fallback | None:
        """Why the request is served as if it had opted out, or `None`."""
        if state.diverted is not None:
            return state.diverted
        if not self._modes.is_on:
            return Fallback.SWITCHED
        return self._features.diversion(state)


def logprob_start(req: Req) -> int | None:
    """The position from which the request wants logprobs, all of which are computed, or `None`.

    After a retraction it may be the prompt's end: the answer so far is prefilled, and needs its logprobs again.
    """
    return int(req.logprob_start_len) if req.return_logprob and req.logprob_start_len >= 0 else None
