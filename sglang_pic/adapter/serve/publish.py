"""Publishes a request's rows to the chunk index: those that it computed become donors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.state import RequestState, is_apart, tokens_of, tree_namespace
from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import ContentIndex, Exactness, Span, Tokens, rows_from_store, rows_of_request

INDEX_TOKENS: Final = Metric("sglang:pic_index_tokens", MetricKind.GAUGE, "Tokens in the chunk index.")
INDEX_BYTES: Final = Metric("sglang:pic_index_bytes", MetricKind.GAUGE, "Host memory of the chunk index, estimated.")
INDEX_MAX_TOKENS: Final = Metric("sglang:pic_index_max_tokens", MetricKind.GAUGE, "core.max_index_tokens.")
INDEX_MAX_BYTES: Final = Metric("sglang:pic_index_max_bytes", MetricKind.GAUGE, "core.max_index_bytes.")
METRICS: Final = (INDEX_TOKENS, INDEX_MAX_TOKENS, INDEX_BYTES, INDEX_MAX_BYTES)


class IndexReport(msgspec.Struct, frozen=True):
    """The chunk index's part of `/server_info`."""

    tokens: int
    max_tokens: int
    bytes: int
    """Estimated."""
    max_bytes: int


class Publication:
    """Publishes to the chunk index.

    Args:
        index: the chunk index.
        delimiters: ids of tokens that open or close a message, where cutting restarts.
        series: exports `METRICS`.
    """

    def __init__(self, index: ContentIndex, delimiters: frozenset[int], series: Series | None = None) -> None:
        self.index, self._delimiters, self._series = index, delimiters, series or Series((), None)
        self._series.set(INDEX_MAX_TOKENS, index.config.max_index_tokens)
        self._series.set(INDEX_MAX_BYTES, index.config.max_index_bytes)

    def publish(
        self,
        req: Req,
        path_len: int,
        *,
        adopted_from: int,
        adopted_again: Sequence[tuple[int, int]] = (),
        donates: bool = True,
    ) -> None:
        """Publish the request's rows by `rows_of_request`; text is cut in `settle`, or before the next plan.

        Args:
            req: the request.
            path_len: tokens whose rows are in the tree.
            adopted_from: first position whose row the tree adopted.
            adopted_again: spans before that which the tree had on the host only, and adopted for the device.
            donates: whether rows that it computed become donors.
        """
        state: RequestState = req.pic
        if state.matched_len is None:
            return
        published = rows_of_request(
            path_len,
            adopted_from,
            matched_len=state.matched_len,
            prefix=state.prefix,
            spliced=[(rows.start, rows.end) for rows in state.spliced],
            generations=[(rows.start, rows.generation) for rows in state.spliced],
            adopted_again=adopted_again,
        )
        if published is not None:
            published = published if donates else published._replace(computed=())
            tokens = tokens_of(req, path_len + self.index.names.lookahead)
            self.index.note(tree_namespace(req), tokens, published, self._delimiters)

    def publish_loaded(
        self, namespace: Namespace, tokens: Tokens, loaded: Span, exact_end: int, *, on_device: int
    ) -> None:
        """Publish the rows of a span of a path, loaded from a store, by `rows_from_store`."""
        start, end = loaded
        published = rows_from_store(start, end, exact_end, self.index.config.max_generation, on_device=on_device)
        self.index.note(namespace, tokens[: end + self.index.names.lookahead], published, self._delimiters)

    def prefix_of(self, req: Req) -> Exactness:
        """The exactness of a request's exact prefix, `[0, req.prefix_len)`."""
        if not req.prefix_len or is_apart(req):
            return Exactness(exact_len=req.prefix_len)
        return self.index.exactness(tree_namespace(req), tokens_of(req, req.prefix_len))

    def settle(self) -> None:
        """Apply the publications that wait.

        Raises:
            Exception: a publication failed.
        """
        self.index.settle()
        self._export_size()

    def _export_size(self) -> None:
        self._series.set(INDEX_TOKENS, self.index.num_tokens)
        self._series.set(INDEX_BYTES, self.index.num_bytes)

    def report(self) -> IndexReport:
        """How full the index is."""
        limits = self.index.config
        return IndexReport(self.index.num_tokens, limits.max_index_tokens, self.index.num_bytes, limits.max_index_bytes)

    def flush(self) -> None:
        """Empty the index."""
        self.index.flush()
        self._export_size()
