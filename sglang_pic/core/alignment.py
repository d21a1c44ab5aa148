"""Aligns a donor's context with the text before its run, and finds the changed fields.

    donor's path  [0, shared)  [field: 18:27]  [equal ...............)  donor
    prompt        [0, shared)  [field: 18:28]  [equal ...............)  run

The walk begins at the run, where both sides are equal, and goes back. A difference of at most `max_field_tokens` on
both sides, between equal flanks, is a changed field; so is a removed text, such as a correction, and an added one of a
quarter of that. If only one side of a longer difference is short, a field changed beside an added or removed text. A
replaced image is a changed field of any length. All other differences are moved or other text. Fields before an added
or removed text are found from the common prefix on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sglang_pic.core import budget, token_loops
from sglang_pic.core.plan import Context
from sglang_pic.core.spans import Span
from sglang_pic.core.tokens import MEDIA_FROM, Tokens, common_len
from sglang_pic.core.trie import ANY, Node, Trie, equal_start, node_before, tokens_before

# Equal tokens that end a difference; fewer are equal by chance.
_FLANK_TOKENS = 8
# Equal tokens inside a difference that split it into two fields.
_SAME_TOKENS = 4
# A text that was only added is a field up to this part of `max_field_tokens`.
_ADDED_PART = 4
# Before text that was added or removed a longer field is another text: an id has up to 40 tokens.
_VALUE_TOKENS = 48
# Equal text before a difference is looked for at every such token: a prime, because texts repeat in periods.
_PROBE_TOKENS = 11
# Beside an added or removed text, the long side is compared over so many tokens more than the short side has.
_BESIDE_TOKENS = 8
MAX_ALIGNED_FIELDS = 256
"""The walk ends at a context with more changed fields, and everything after them is computed."""
# A difference with more pairs of equal tokens is one field: a text of few words differs everywhere.
_MAX_PAIRS = 2048


class Difference(NamedTuple):
    """A changed field: the donor's path has `old` where the prompt has the span `new`; one may be empty."""

    old: Tokens
    before: Tokens
    """The donor's tokens directly before the field."""
    new: Span

    @property
    def key(self) -> tuple[Span, bytes]:
        """Identifies a changed field within one prompt."""
        return self.new, self.old.tobytes()


class Alignment(NamedTuple):
    """How the context of one donor differs from the prompt."""

    rest: Context
    """Of what is left beside the fields."""
    fields: tuple[Difference, ...] = ()

    @property
    def context(self) -> Context:
        """With the fields."""
        return Context.CHANGED if self.fields else self.rest


_SAME, _MOVED, _OTHER = map(Alignment, (Context.SAME, Context.MOVED, Context.OTHER))


class _Ahead(NamedTuple):
    """How a donor's path goes on after the prefix that it shares with the prompt, up to another text."""

    old_at: int
    """It is compared up to here."""
    new_at: int
    fields: tuple[tuple[int, Difference], ...] = ()
    """Ascending, each with its end on the path."""
    is_over: bool = False
    """Whether another text begins here."""


class Aligner:
    """Aligns contexts for one plan.

    Args:
        trie: the donors' paths.
        tokens: the prompt.
        max_field_tokens: longest side of a changed field; with 0 nothing is compared: every context is `OTHER`.
    """

    def __init__(self, trie: Trie, tokens: Tokens, max_field_tokens: int) -> None:
        self._trie, self._tokens, self._most = trie, tokens, max_field_tokens
        self._probes = np.arange(0, max_field_tokens + 1, _PROBE_TOKENS, np.int64)
        # (serial of a node, shift) -> the last alignment there: a later run is often on the same path.
        self._known: dict[tuple[int, int], tuple[int, Alignment]] = {}
        self._known_parts: dict[tuple[bytes, int, int], list[tuple[Span, Span]]] = {}
        # Serial of a node or the root -> how many leading tokens its path shares with the prompt.
        self._shared: dict[int, int] = {}
        # Serial of a node -> the fields ahead on its path, as far as it goes.
        self._aheads: dict[int, _Ahead] = {}
        self.work = 0
        """Cost so far, in tokens compared."""

    def align(self, node: Node, start: int, shift: int) -> Alignment:
        """Compare the text before a donor with the text before its run.

        Args:
            node: on the donor's path, at or below the token before the donor.
            start: where the run starts in the prompt.
            shift: the run's shift.
        """
        if not self._most:
            return _OTHER
        alignment = self._align(node, start, shift)
        self.work += budget.PER_FIELD * len(alignment.fields)
        self._known[node.serial, shift] = start, alignment
        return alignment

    def _align(self, node: Node, start: int, shift: int) -> Alignment:
        at, shared, first_shift = start, self._shared_len(node), shift
        fields: list[Difference] = []
        while True:
            low = max(shared, shared + shift)
            known_from, known = self._known.get((node.serial, shift), (low, None))
            if known_from > at:
                # It is the alignment of a later run.
                known_from, known = low, None
            if at > low:
                self.work += budget.PER_WALK_STEP + at
                node, at, _ = equal_start(node, at, shift, self._tokens, max(low, min(known_from, at)), ANY)
                self.work -= at
            if known is not None and at == known_from:
                return _join(known, fields)
            old_len, new_len = at - shift - shared, at - shared
            if min(old_len, new_len) < 0 or old_len == new_len == 0 or len(fields) > MAX_ALIGNED_FIELDS:
                return _join(_SAME if shift == first_shift == 0 else _MOVED, fields)
            images = self._images(node, at - shift, old_len, at, new_len)
            if images is not None:
                fields.append(images)
                old_len, new_len = len(images.old), at - images.new[0]
                at, shift = at - new_len, shift + old_len - new_len
                continue
            if max(old_len, new_len) > self._most:
                short = self._fall_in_step(node, at - shift, at, shared)
                if short is None:
                    return self._beside(node, at, shift, shared, fields)
                old_len, new_len = short
            if old_len > 0 or new_len <= self._most // _ADDED_PART:
                fields += self._differences(node, at - shift, old_len, at, new_len)
            at, shift = at - new_len, shift + old_len - new_len

    def _shared_len(self, node: Node) -> int:
        """How many leading tokens the path to `node` shares with the prompt."""
        known = self._shared.get(node.serial)
        if known is not None:
            return known
        if not self._shared:
            # The prompt's own path.
            last, length = self._trie.walk(self._tokens)
            self._shared = {each.serial: min(each.end, length) for each in (self._trie.root, *last.lineage())}
        line: list[int] = []
        while node.serial not in self._shared and node.parent is not None:
            line.append(node.serial)
            node = node.parent
        shared = self._shared.get(node.serial, 0)
        self._shared.update(dict.fromkeys(line, shared))
        self.work += budget.PER_NODE * len(line)
        return shared

    def _images(self, node: Node, old_end: int, old_len: int, new_end: int, new_len: int) -> Difference | None:
        """The difference if both sides end with an image, of any length; else None."""
        if min(old_len, new_len) <= 0 or self._tokens[new_end - 1] < MEDIA_FROM:
            return None
        new_image = _image_at_end(self._tokens[new_end - new_len : new_end])
        # Read the donor's path back to where its image begins.
        length, old = 0, self._tokens[:0]
        while len(old) == length < old_len:
            length = min(max(4 * length, new_image), old_len)
            taken = tokens_before(node, old_end, length)
            old = taken[length - _image_at_end(taken) :]
            self.work += length
        if not len(old):
            return None
        old_start = old_end - len(old)
        before = tokens_before(node, old_start, min(_FLANK_TOKENS, old_start))
        return Difference(old, before, (new_end - new_image, new_end))

    def _fall_in_step(self, node: Node, old_end: int, new_end: int, shared: int) -> tuple[int, int] | None:
        """The lengths of a short difference that ends at these places, after equal text; None if there is none."""
        most = self._most + _FLANK_TOKENS
        old = tokens_before(node, old_end, min(most, old_end - shared))
        return self._short(old, self._tokens[max(shared, new_end - most) : new_end])

    def _short(self, old: Tokens, new: Tokens) -> tuple[int, int] | None:
        """The lengths of a short difference at the end of these tokens."""
        skipped, at = token_loops.find_flank(old, new, self._probes, _FLANK_TOKENS)
        if at < 0:
            return None
        new_at = at + _FLANK_TOKENS
        more = common_len(old[len(old) - skipped :], new[new_at:])
        return skipped - more, len(new) - new_at - more

    def _beside(self, node: Node, at: int, shift: int, shared: int, fields: list[Difference]) -> Alignment:
        """The alignment of two sides that differ from here back to their common prefix."""
        old_len, new_len = at - shift - shared, at - shared
        short = min(old_len, new_len)
        if short == 0:
            return _join(_MOVED, fields)
        if shared == 0:
            return _join(_OTHER, fields)
        if short > self._most:
            ahead = self._ahead(node_before(node, at - shift), shared)
            short = min(at - shift - ahead.old_at, at - ahead.new_at)
            values = [max(len(field.old), field.new[1] - field.new[0]) for _, field in ahead.fields]
            if short > self._most or max(values, default=0) > _VALUE_TOKENS:
                return _join(_OTHER, fields)
            # Values changed, and between them and the run text was added or removed.
            before = [field for end, field in ahead.fields if end <= at - shift and field.new[1] <= at]
            return _join(Alignment(Context.OTHER, tuple(before)), fields)
        # The rest of the longer side is the text that was added or removed.
        most = short + _BESIDE_TOKENS
        old_end, new_end = shared + min(old_len, most), shared + min(new_len, most)
        fields += self._differences(node_before(node, old_end), old_end, old_end - shared, new_end, new_end - shared)
        return _join(_OTHER, fields)

    def _ahead(self, node: Node, shared: int) -> _Ahead:
        """The fields on the path to a node after the prefix that it shares with the prompt, up to another text."""
        line: list[Node] = []
        while node.serial not in self._aheads and node.parent is not None and node.end > shared:
            line.append(node)
            node = node.parent
        ahead = self._aheads.get(node.serial, _Ahead(shared, shared))
        for each in reversed(line):
            ahead = self._aheads[each.serial] = self._extended(ahead, each)
        return ahead

    def _extended(self, ahead: _Ahead, node: Node) -> _Ahead:
        """The same with the tokens of one more node of the path."""
        (old_at, new_at, known, is_over), most = ahead, self._most + _FLANK_TOKENS
        if is_over:
            return ahead
        fields = list(known)
        path = tokens_before(node, node.end, node.end - old_at)
        self.work += len(path) // budget.COPIED_TOKENS
        while not is_over:
            left = path[len(path) - (node.end - old_at) :]
            equal = common_len(left, self._tokens[new_at:])
            self.work += budget.PER_WALK_STEP + equal
            old_at, new_at, left = old_at + equal, new_at + equal, left[equal:]
            if not len(left):
                break
            # Backwards the difference is at the end.
            old, new = (side[:most][::-1].copy() for side in (left, self._tokens[new_at:]))
            lens = self._short(old, new)
            if lens is None:
                # What comes after this node may end the difference.
                is_over = len(left) >= most
                break
            old_at, new_at = old_at + lens[0], new_at + lens[1]
            if lens[0] > 0 or lens[1] <= self._most // _ADDED_PART:
                found = self._differences(node_before(node, old_at), old_at, lens[0], new_at, lens[1])
                fields += [(old_at, field) for field in [*found][::-1]]
            is_over = len(fields) > MAX_ALIGNED_FIELDS
        return _Ahead(old_at, new_at, tuple(fields), is_over)

    def _differences(self, node: Node, old_end: int, old_len: int, new_end: int, new_len: int) -> Iterator[Difference]:
        """The fields in a difference, from the last one back."""
        taken = tokens_before(node, old_end, min(old_end, old_len + _FLANK_TOKENS))
        flank, new_start = len(taken) - old_len, new_end - new_len
        parts = [((0, old_len), (0, new_len))]
        if min(old_len, new_len) > _SAME_TOKENS:
            # Runs after the same field on several paths have the same difference before them.
            key = taken[flank:].tobytes(), new_start, new_end
            known = self._known_parts.get(key)
            if known is None:
                known = self._parts(taken[flank:], self._tokens[new_start:new_end])
                self._known_parts[key] = known
            parts = known
        for (old_from, old_to), (new_from, new_to) in reversed(parts):
            before = taken[max(0, flank + old_from - _FLANK_TOKENS) : flank + old_from]
            new = new_start + new_from, new_start + new_to
            old = taken[flank + old_from : flank + old_to]
            yield Difference(old, before, new)

    def _parts(self, old: Tokens, new: Tokens) -> list[tuple[Span, Span]]:
        """The unequal parts of a difference, as spans of both sides."""
        num_pairs, equal = token_loops.equal_parts(old, new, _SAME_TOKENS, _MAX_PAIRS)
        self.work += len(old) * len(new) // budget.PAIRS + num_pairs
        if num_pairs > _MAX_PAIRS:
            return [((0, len(old)), (0, len(new)))]
        parts = []
        old_at = new_at = 0
        for old_from, new_from, length in [*sorted(equal.reshape(-1, 3).tolist()), [len(old), len(new), 0]]:
            if old_at < old_from or new_at < new_from:
                parts.append(((old_at, old_from), (new_at, new_from)))
            old_at, new_at = old_from + length, new_from + length
        return parts


def _image_at_end(tokens: Tokens) -> int:
    """How many trailing tokens are media."""
    text = np.flatnonzero(tokens[::-1] < MEDIA_FROM)
    return int(text[0]) if len(text) else len(tokens)


def _join(rest: Alignment, fields: list[Difference]) -> Alignment:
    """The alignment `rest` with `fields`, given from the last one back, added after its own."""
    if not fields:
        return rest
    return Alignment(rest.rest, (*rest.fields, *reversed(fields))[: MAX_ALIGNED_FIELDS + 1])
