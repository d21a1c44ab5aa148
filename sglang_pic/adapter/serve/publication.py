"""Tells the chunk index which rows a request computed itself, so that they become donors."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.seams import Req, Tree
from sglang_pic.adapter.serve.media import plain_ids, tokens_of
from sglang_pic.adapter.serve.planning import tree_namespace
from sglang_pic.adapter.serve.state import RequestState, is_apart
from sglang_pic.adapter.serve.telling import Telling
from sglang_pic.core import ContentIndex, Exactness, Span, Tokens, intersect_spans


class Publication:
    """Fills the chunk index.

    Args:
        index: what is filled.
        delimiters: ids of tokens that open or close a message, where text is cut anew.
        telling: tells routers; None where nobody is told.
    """

    def __init__(self, index: ContentIndex, delimiters: frozenset[int], telling: Telling | None = None) -> None:
        self._index, self._delimiters, self.telling = index, delimiters, telling

    def publish(
        self, req: Req, path_len: int, *, adopted_from: int, adopted_again: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Note which rows of `[adopted_from, path_len)` the request computed itself, and which were spliced.

        The text is cut in `settle`, after the answer, or before the next plan.

        Args:
            req: the request; its rows are in the tree.
            path_len: how many.
            adopted_from: those before were there already.
            adopted_again: but of these the tree had rows on the host only, and took ours for the device. Both copies
                may be read from then on: what we spliced is no donor, and what we computed is none that was none.

        NOTE: only rows that the tree adopted count. Rows of another request that got there first stay as that request
        published them; ours were freed as duplicates.
        """
        state: RequestState = req.pic
        if state.matched_len is None:
            return
        start = max(adopted_from, state.matched_len)
        again = [span for span in adopted_again if span[1] > state.matched_len]
        if start >= path_len and not again:
            return
        first = max(state.matched_len, again[0][0]) if again else start
        adopted = [*again, (start, path_len)]
        spliced = [part for span in adopted for part in intersect_spans(state.spliced, *span)]
        # NOTE: a row that was computed behind spliced ones is approximate, although the tree may have another request's
        # computed rows in their place.
        behind = state.prefix.approximate(state.spliced, path_len)
        self._index.note(
            tree_namespace(req),
            tokens_of(req, path_len + self._index.names.lookahead),
            [(start, path_len)] if start < path_len else [],
            spliced=spliced,
            approximate=[part for span in adopted for part in intersect_spans(behind, *span)],
            # Before `first` the tree may have cleaner rows of another request: ours were computed behind our own.
            generations=[(max(position, first), number) for position, number in state.generations],
            delimiters=self._delimiters,
        )

    def publish_loaded(self, namespace: Namespace, tokens: Tokens, start: int, exact_end: int) -> None:
        """Note the rows of a path that came from a store, from `start` on.

        Up to `exact_end` other servers computed them, at their positions. Those behind are spliced, or stand behind
        spliced ones, or their server had forgotten which: no donors, approximate, and as old as rows may be that are.
        """
        behind = [(max(start, exact_end), len(tokens))] if exact_end < len(tokens) else []
        old = [(begin, self._index.config.max_generation) for begin, _ in behind]
        exact = [(start, min(exact_end, len(tokens)))] if start < exact_end else []
        self._index.note(namespace, tokens, exact, approximate=behind, generations=old, delimiters=self._delimiters)

    def may_be_shared(self, namespace: Namespace, tokens: Tokens) -> bool:
        """Whether the rows of a path have no more changed fields behind them than donors may have."""
        return self._index.generation(namespace, tokens) <= self._index.config.max_generation

    def unknown(self, namespace: Namespace, tokens: Tokens, start: int, least: int) -> list[Span]:
        """As `ContentIndex.unknown`."""
        return self._index.unknown(namespace, tokens, start, least)

    def exactness(self, namespace: Namespace, tokens: Tokens) -> Exactness:
        """As `ContentIndex.exactness`."""
        return self._index.exactness(namespace, tokens)

    def prefix_of(self, req: Req) -> Exactness:
        """What is known of the rows that a request's row begins with, `req.prefix_len` of them."""
        if not req.prefix_len or is_apart(req):
            return Exactness(exact_len=req.prefix_len)
        return self._index.exactness(tree_namespace(req), tokens_of(req, req.prefix_len))

    def settle(self) -> None:
        """Publish what was noted.

        Raises:
            Exception: a publication failed.
        """
        self._index.settle()

    def tell(self, tree: Tree, to_ids: Callable[[Tokens], array[int]] = plain_ids) -> None:
        """Have routers told what is new, and what the tree evicted; `to_ids` makes SGLang's ids of a path's tokens.

        Raises:
            Exception: the tree could not be asked, or a publication failed.
        """
        if self.telling is not None:
            self.telling.forget_evicted(self._index, tree, to_ids)
            self.telling.hand_over(self._index)

    @property
    def is_whole(self) -> bool:
        """Whether every change of the index was carried out."""
        return self._index.is_whole

    def flush(self) -> None:
        """The tree was emptied: there are no donors."""
        self._index.flush()
        if self.telling is not None:
            self.telling.flush()
