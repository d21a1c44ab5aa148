"""What the stations of a request share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_pic.adapter.metrics import Metric, Series
from sglang_pic.adapter.probe.ranks import fault_group
from sglang_pic.adapter.serve import account, faults, publish
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.media import TextOnly
from sglang_pic.adapter.serve.modes import Eligibility, Modes
from sglang_pic.adapter.serve.traffic_log import TrafficLog
from sglang_pic.adapter.sglang.seams import TpGroup
from sglang_pic.config import PicConfig
from sglang_pic.core import ContentIndex


class Stations:
    """The shared objects of one scheduler rank; all ranks must make them together.

    Args as for their classes; `ranks` serve the same requests, `None` for one rank.
    """

    def __init__(
        self,
        config: PicConfig,
        index: ContentIndex,
        delimiters: frozenset[int],
        modes: Modes,
        media: TextOnly,
        *,
        labels: Mapping[str, str] | None = None,
        ranks: TpGroup | None = None,
        shares_passes: bool = False,
    ) -> None:
        self.config, self.index, self.modes, self.media = config, index, modes, media
        self.labels, self.ranks, self.features = labels, ranks, Features()
        self.publication = publish.Publication(index, delimiters, self.series(publish.METRICS))
        log = TrafficLog(self.features) if ranks is None or ranks.rank_in_group == 0 else None
        self.accounting = account.Accounting(self.series(account.METRICS), log)
        series, group = self.series(faults.METRICS), fault_group(ranks)
        self.faults = faults.Faults(config.fault_limit, series, group, shares_passes=shares_passes)
        self.recovery = faults.Recovery(self.faults, self.accounting, self.publication, self.features)
        self.eligibility = Eligibility(config.core.sink_tokens, media, modes, self.faults, self.features)

    def series(self, metrics: Iterable[Metric]) -> Series:
        """Exports metrics of this rank."""
        return Series(metrics, self.labels)
