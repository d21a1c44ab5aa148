"""Faults: exceptions in this plugin while requests are served; the requests are then computed in full.

A fault is a bug or a lack of memory; it costs reuse and never an answer. Each one is counted by reason, the first of
each reason is logged with its traceback, and `fault_limit` of them switch splicing off until the cache is flushed or
the server restarts. Everything here runs on the scheduler's thread.

Tensor-parallel ranks continue only if all of them had the same fault: a rank that alone computes in full would hang, or
receive numbers of another pass. Without a fault ranks exchange nothing. With DP attention this applies to the ranks
that serve the same requests; a fault in a pass, which all ranks share, ends the server.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import torch

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.probe.ranks import FaultGroup
from sglang_pic.adapter.serve.account import Accounting
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.publish import Publication
from sglang_pic.adapter.sglang.seams import Req

logger = logging.getLogger(__name__)

SWITCHED_OFF: Final = Metric(
    "sglang:pic_switched_off", MetricKind.GAUGE, "1 while faults have switched splicing off on this server, else 0."
)
METRICS: Final = (SWITCHED_OFF,)

# The device or the other ranks are lost, and every pass from here on would fail.
_LOST: Final = (torch.AcceleratorError, torch.distributed.DistError)


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """The faults' part of `/server_info`."""

    limit: int
    num_faults: int
    """Since the start or the last flush of the cache."""
    is_off: bool
    """Whether faults have switched splicing off."""
    by_reason: dict[str, int]
    """Since the start."""


class Faults:
    """The faults of one scheduler rank.

    Args:
        limit: the number of faults that switches splicing off.
        series: exports `METRICS`.
        ranks: the ranks that serve the same requests, or `None` for one rank.
        shares_passes: whether other ranks run the same passes, whatever they serve.
    """

    def __init__(
        self,
        limit: int = 8,
        series: Series | None = None,
        ranks: FaultGroup | None = None,
        *,
        shares_passes: bool = False,
    ) -> None:
        self._limit, self._series, self._ranks = limit, series or Series((), None), ranks
        self._shares_passes = shares_passes or ranks is not None
        self._by_reason: Counter[Fallback] = Counter()
        self._num_faults = 0
        self.is_off = False
        """Whether faults have switched splicing off."""
        self.num_restarts = 0
        """How often a fault emptied the index. Later requests reuse no rows from before: the index does not know which
        of them are spliced."""

    def note(self, reason: Fallback, error: Exception, *, in_pass: bool = False) -> None:
        """Count and log a fault.

        Args:
            reason: the step that failed.
            error: the exception.
            in_pass: during a forward pass, when other ranks may already wait for this one.

        Raises:
            Exception: `error` itself if the device is lost or ranks would differ.
        """
        if isinstance(error, _LOST) or isinstance(error.__cause__, _LOST) or (in_pass and self._shares_passes):
            raise error
        self._num_faults += 1
        self.is_off = self._num_faults >= self._limit
        self._by_reason[reason] += 1
        if self._by_reason[reason] == 1:
            logger.error(
                "sglang_pic: %s (%s) No answer is wrong. Please report this; further faults of this reason are "
                "counted and logged at DEBUG.",
                reason.description,
                reason.value,
                exc_info=error,
            )
        else:
            logger.debug("sglang_pic: %s", reason.description, exc_info=error)
        if self._ranks is not None:
            self._ranks.check(f"{reason.value} {self._num_faults} {type(error).__name__}")
        if self._num_faults == self._limit:
            self._series.set(SWITCHED_OFF, 1)
            logger.warning(
                "sglang_pic: splicing is switched off after %d faults (fault_limit): all requests are computed as "
                "usual. POST /flush_cache or a restart switches it on again.",
                self._num_faults,
            )

    def flush(self) -> None:
        """Switch splicing on again after a flush of the cache."""
        if self.is_off:
            logger.info("sglang_pic: the cache was flushed: splicing is on again after %d faults", self._num_faults)
        self._num_faults, self.is_off = 0, False
        self._series.set(SWITCHED_OFF, 0)

    def report(self) -> FaultReport:
        """What `/server_info` shows."""
        return FaultReport(
            limit=self._limit,
            num_faults=self._num_faults,
            is_off=self.is_off,
            by_reason={reason.value: count for reason, count in self._by_reason.items()},
        )


class Recovery:
    """Turns exceptions of one scheduler rank into faults, after which requests are computed in full."""

    def __init__(self, faults: Faults, accounting: Accounting, publication: Publication, features: Features) -> None:
        self._faults, self._accounting, self._publication, self._features = faults, accounting, publication, features

    def recover(
        self,
        reqs: Iterable[Req],
        reason: Fallback,
        error: Exception,
        *,
        is_admitted: bool = False,
        in_pass: bool = False,
    ) -> None:
        """Count a fault, and have requests computed in full.

        Args:
            reqs: the requests whose reuse failed.
            reason: the step that failed.
            error: the exception.
            is_admitted: whether a chunk of them was admitted that no pass has computed.
            in_pass: during a forward pass.

        Raises:
            Exception: `error` itself if the device is lost or ranks would differ.
        """
        for req in reqs:
            req.pic.is_faulty = True
            req.pic.drop_plan()
            req.pic.counts.reasons[reason] += 1
            if is_admitted:
                self._accounting.undo(req)
        self._accounting.count_fallback(reason)
        self._faults.note(reason, error, in_pass=in_pass)
        is_lost = reason in (Fallback.FAULT_PUBLICATION, Fallback.FAULT_PINS) or not self._publication.index.is_whole
        if is_lost or self._faults.is_off:
            # NOTE: the index does not know which rows of the tree are spliced, nor their generations. So later requests
            # must not match those rows.
            self._faults.num_restarts += 1
            self._publication.flush()
            for feature in self._features:
                feature.on_index_lost()

    @contextmanager
    def guarded(self, reason: Fallback, reqs: Iterable[Req] = (), *, is_admitted: bool = False) -> Iterator[None]:
        """Turn an exception into a fault, as `recover` does."""
        try:
            yield
        except Exception as error:
            self.recover(reqs, reason, error, is_admitted=is_admitted)
