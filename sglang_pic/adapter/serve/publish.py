"""Tells the chunk index which rows a request computed itself, so that they become donors."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.media import tokens_of
from sglang_pic.adapter.serve.planning import tree_namespace
from sglang_pic.adapter.serve.state import RequestState, is_apart
from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import ContentIndex, Exactness, Span, Tokens, rows_from_store, rows_of_request


class Publication:
    """Fills the chunk index.

    Args:
        index: what is filled.
        delimiters: ids of tokens that open or close a message, where text is cut anew.
    """

    def __init__(self, index: ContentIndex, delimiters: frozenset[int]) -> None:
        self.index, self._delimiters = index, delimiters

    def publish(
        self, req: Req, path_len: int, *, adopted_from: int, adopted_again: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Note which of the request's rows it computed itself, and which were spliced, by `rows_of_request`.

        The text is cut in `settle`, after the answer, or before the next plan.

        Args:
            req: the request; its rows are in the tree.
            path_len: how many.
            adopted_from: those before were there already.
            adopted_again: but of these the tree had rows on the host only, and took ours for the device.
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
            tokens = tokens_of(req, path_len + self.index.names.lookahead)
            self.index.note(tree_namespace(req), tokens, published, self._delimiters)

    def publish_loaded(self, namespace: Namespace, tokens: Tokens, start: int, exact_end: int) -> None:
        """Note the rows of a path that came from a store, from `start` on; up to `exact_end` they are exact."""
        published = rows_from_store(start, len(tokens), exact_end, self.index.config.max_generation)
        self.index.note(namespace, tokens, published, self._delimiters)

    def may_be_shared(self, namespace: Namespace, tokens: Tokens) -> bool:
        """Whether the rows of a path have no more changed fields behind them than donors may have."""
        return self.index.generation(namespace, tokens) <= self.index.config.max_generation

    def unknown(self, namespace: Namespace, tokens: Tokens, start: int, least: int) -> list[Span]:
        """As `ContentIndex.unknown`."""
        return self.index.unknown(namespace, tokens, start, least)

    def exactness(self, namespace: Namespace, tokens: Tokens) -> Exactness:
        """As `ContentIndex.exactness`."""
        return self.index.exactness(namespace, tokens)

    def prefix_of(self, req: Req) -> Exactness:
        """What is known of the rows that a request's row begins with, `req.prefix_len` of them."""
        if not req.prefix_len or is_apart(req):
            return Exactness(exact_len=req.prefix_len)
        return self.index.exactness(tree_namespace(req), tokens_of(req, req.prefix_len))

    def settle(self) -> None:
        """Publish what was noted.

        Raises:
            Exception: a publication failed.
        """
        self.index.settle()

    @property
    def is_whole(self) -> bool:
        """Whether every change of the index was carried out."""
        return self.index.is_whole

    def flush(self) -> None:
        """The tree was emptied: there are no donors."""
        self.index.flush()
