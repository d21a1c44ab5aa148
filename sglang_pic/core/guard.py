"""The guard of changed fields: rows that may depend on a field's old value are not spliced after its new value.

    prompt   [field][seam][ .... ][line that names it][ .... ][end)
    computed [field][seam]        [line that names it]  [tail of the prompt)
    spliced               [ .... ]                    [ ]

A row's generation counts the splices after a changed field that it depends on, directly or through the rows before it;
fields that the text does not name do not count. Rows above `max_generation` are not spliced. If those would have served
more tokens than the other rows with a generation above 0, only rows of generation 0 are spliced, so this request
computes clean rows.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from sglang_pic.core import budget
from sglang_pic.core.alignment import MAX_ALIGNED_FIELDS, Aligner, Alignment, Difference
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.mentions import Mentions, find_mentions
from sglang_pic.core.plan import Context, DropReason, Run
from sglang_pic.core.query import Query
from sglang_pic.core.spans import Span, merge_spans, subtract_spans
from sglang_pic.core.tokens import Tokens, hold_media
from sglang_pic.core.trie import Node

# Fewer tokens between two computed spans are computed too: a gap costs more.
_MIN_PIECE_TOKENS = 16
# The first tokens of a message are its role.
_ROLE_TOKENS = 4
# Equal tokens between two fields of one word, at most.
_JOINING_TOKENS = 32
# Limits on the fields of one plan, and on those of all its runs together; runs beyond them are computed. Recorded
# sessions have at most 21 changed fields in a plan, and 27 runs.
_MAX_FIELDS = 512
_MAX_FIELDS_BEHIND = 8192


class Guarded(NamedTuple):
    """The runs of a plan after the guard."""

    runs: list[Run]
    changed_fields: tuple[Span, ...]
    """In the prompt; empty spans for removed values."""
    spans: tuple[Span, ...]
    """Spans of the runs that are computed instead."""


class Guard:
    """The guard of one plan.

    Args:
        query: `policy.edit` decides what is computed; without a lexicon that is everything after a changed field.
    """

    def __init__(self, query: Query) -> None:
        self._query, self._policy, self._tokens, self._lexicon = query, query.policy, query.tokens, query.lexicon
        self._aligner = Aligner(query.trie, query.tokens, query.policy.max_field_tokens)
        self._fields: dict[int, tuple[Difference, ...]] = {}
        # Serial of a node -> the highest generation above it.
        self._above: dict[int, int] = {}
        self._parts: dict[tuple[Span, bytes], list[Difference]] = {}
        self._are_joined: dict[Span, bool] = {}
        self._refused: list[Span] = []

    @property
    def work(self) -> int:
        """Cost of looking for changed fields beside what the query counts, in tokens compared."""
        return self._aligner.work

    def admits(self, node: Node, start: int, end: int, shift: int) -> bool:
        """Whether the generation of a donor's rows allows splicing them at `[start, end)`."""
        if self._policy.edit == "in_place":
            return True
        most = 0 if self._policy.edit == "recompile" else self._policy.max_generation
        if self._generation(node, end - shift) <= most:
            return True
        self._refused.append((start, end))
        self._query.dropped[DropReason.GENERATION] += 1
        return False

    def is_changed(self, node: Node, start: int, shift: int) -> bool:
        """Whether a field before the donor of `[start, ...)` has another value in the prompt; False if `in_place`."""
        return self._policy.edit != "in_place" and self._align(node, start, shift).context is Context.CHANGED

    def watch(self, run: Run, node: Node) -> Run | None:
        """Record the changed fields before a chosen run; returns the run with its context and generation.

        `None`, counted, if too many fields before it changed.
        """
        alignment = self._align(node, run.target_start, run.shift)
        if len(alignment.fields) > MAX_ALIGNED_FIELDS:
            self._query.dropped[DropReason.BUDGET] += 1
            return None
        self._fields[run.target_start] = self._whole_words(alignment.fields, self._lexicon)
        generation = self._generation(node, run.donor_end)
        is_other = alignment.rest is Context.OTHER
        return msgspec.structs.replace(run, context=alignment.context, is_other=is_other, generation=generation)

    def protect(self, runs: list[Run]) -> Guarded:
        """Remove the spans that must be computed from the runs."""
        fields, watched = self._within_budget(runs)
        if not fields and not self._refused and len(watched) == len(runs):
            return Guarded(runs, (), ())
        notes = dict(zip(fields, self._must_compute([*fields.values()]), strict=True))
        behind = {run.target_start: [notes[field.key] for field in self._fields[run.target_start]] for run in watched}
        aged = [self._age(run, behind[run.target_start]) for run in watched]
        kept = [piece for run in self._renew(aged) for piece in self._cut(run, behind[run.target_start])]
        before, after = ([(run.target_start, run.target_end) for run in each] for each in (runs, kept))
        # The span of a removed value is empty, but is a change.
        changed_fields = tuple(sorted({field.new for field in fields.values()}))
        return Guarded(kept, changed_fields, tuple(subtract_spans(before, after)))

    def _within_budget(self, runs: list[Run]) -> tuple[dict[tuple[Span, bytes], Difference], list[Run]]:
        """The fields before the runs by their keys, and the runs that the limits on fields allow."""
        fields: dict[tuple[Span, bytes], Difference] = {}
        watched, num_behind = [], 0
        for run in runs:
            before = self._fields[run.target_start]
            if not before:
                watched.append(run)
                continue
            added = {field.key: field for field in before} if num_behind + len(before) <= _MAX_FIELDS_BEHIND else None
            if added is None or len(fields) + sum(key not in fields for key in added) > _MAX_FIELDS:
                self._query.dropped[DropReason.BUDGET] += 1
                continue
            fields.update(added)
            num_behind += len(before)
            watched.append(run)
        return fields, watched

    def _generation(self, node: Node, end: int) -> int:
        """The highest generation of the rows before position `end` of the path to `node`."""
        known = self._above.get(node.serial)
        if known is not None:
            return max(known, node.generation(end)) if node.generations else known
        line, at = [], node
        while at.serial not in self._above and at.parent is not None:
            line.append(at)
            at = at.parent
        above = self._above.get(at.serial, 0)
        for each in reversed(line):
            above = self._above[each.serial] = max(above, at.generation(each.start))
            at = each
        self._query.work += budget.PER_NODE * len(line)
        return max(above, node.generation(end))

    def _align(self, node: Node, start: int, shift: int) -> Alignment:
        found = self._aligner.align(node, start, shift)
        if self._lexicon is None or not 0 < len(found.fields) <= MAX_ALIGNED_FIELDS:
            return found
        fields = tuple(part for field in found.fields for part in self._within_messages(field, self._lexicon))
        return Alignment(max(found.rest, Context.MOVED, key=[*Context].index), fields)

    def _whole_words(self, fields: tuple[Difference, ...], lexicon: Lexicon | None) -> tuple[Difference, ...]:
        """The fields, those of one word as one: a time of which hours and seconds changed."""
        if lexicon is None or len(fields) < 2:
            return fields
        self._query.work += budget.PER_FIELD * len(fields)
        whole = [fields[0]]
        for field in fields[1:]:
            last = whole[-1]
            gap = last.new[1], field.new[0]
            if gap not in self._are_joined:
                self._are_joined[gap] = gap[1] - gap[0] <= _JOINING_TOKENS and lexicon.is_joint(
                    self._tokens[slice(*gap)]
                )
            if self._are_joined[gap]:
                old = np.concatenate([last.old, self._tokens[slice(*gap)], field.old])
                whole[-1] = Difference(old, last.before, (last.new[0], field.new[1]))
            else:
                whole.append(field)
        return tuple(whole)

    def _within_messages(self, field: Difference, lexicon: Lexicon) -> list[Difference]:
        """The parts of a field that are in messages which both sides have; whole messages are no value that changed."""
        if field.key not in self._parts:
            self._parts[field.key] = _parts_of_messages(field, self._tokens, lexicon)
        return self._parts[field.key]

    def _must_compute(self, fields: list[Difference]) -> list[Mentions]:
        """For each field the first position that names it, and the spans to compute because of it."""
        if not fields:
            return []
        if self._policy.edit == "in_place":
            return [Mentions(field.new[0], []) for field in fields]
        if self._policy.edit == "recompile" or self._lexicon is None:
            return [*map(self._all_behind, fields)]
        end, seam = len(self._tokens), self._policy.seam_tokens
        tail = end - self._policy.edit_tail_tokens, end
        found = find_mentions(fields, self._tokens, self._lexicon)
        if found is None:
            self._query.dropped[DropReason.BUDGET] += 1
            return [*map(self._all_behind, fields)]
        return [
            self._all_behind(field)
            # No word names a replaced image.
            if hold_media(field.old) and hold_media(self._tokens[slice(*field.new)])
            else named._replace(spans=[*named.spans, (field.new[1], field.new[1] + seam), tail])
            for field, named in zip(fields, found, strict=True)
        ]

    def _all_behind(self, field: Difference) -> Mentions:
        """Everything after the field, because any of it may depend on the field."""
        return Mentions(field.new[0], [(field.new[0], len(self._tokens))])

    def _age(self, run: Run, behind: list[Mentions]) -> Run:
        """The run, one generation older if a named field is before its end."""
        if any(named.named_from < run.target_end for named in behind):
            return msgspec.structs.replace(run, generation=run.generation + 1)
        return run

    def _renew(self, runs: list[Run]) -> list[Run]:
        """Only the runs of generation 0 if refused donors cover more tokens than the others; else all runs."""
        lacking = subtract_spans(merge_spans(self._refused), [(run.target_start, run.target_end) for run in runs])
        clean = [run for run in runs if run.generation == 0]
        num_unclean = sum(run.num_tokens for run in runs) - sum(run.num_tokens for run in clean)
        if sum(end - start for start, end in lacking) <= num_unclean:
            return runs
        self._query.dropped[DropReason.GENERATION] += len(runs) - len(clean)
        return clean

    def _cut(self, run: Run, behind: list[Mentions]) -> list[Run]:
        """The pieces of the run that may be spliced."""
        if not behind:
            return [run]
        spans = merge_spans(span for named in behind for span in named.spans)
        pieces: list[Run] = []
        for start, end in subtract_spans([(run.target_start, run.target_end)], spans):
            is_cut = start != run.target_start
            is_piece = is_cut or end != run.target_end
            is_long_enough = end - start >= _MIN_PIECE_TOKENS
            if is_piece and not (is_long_enough and self._query.is_worth_it(end - start, start if is_cut else None)):
                continue
            spliced_to = pieces[-1].target_end if pieces else run.target_start - run.seam_len
            piece = msgspec.structs.replace(
                run,
                target_start=start,
                target_end=end,
                donor_start=start - run.shift,
                seam_len=min(start - spliced_to, self._policy.seam_tokens) if is_cut else run.seam_len,
            )
            pieces.append(piece)
        self._query.dropped[DropReason.CHANGED_FIELD] += not pieces
        return pieces


def _parts_of_messages(field: Difference, tokens: Tokens, lexicon: Lexicon) -> list[Difference]:
    """The field itself if no message begins or ends in it; if one does on both sides, the end of the message before and
    the beginning of the one after, where these begin and go on alike."""
    start, end = field.new
    new = tokens[start:end]
    (old_first, old_last), (new_first, new_last) = (lexicon.message_breaks(side) for side in (field.old, new))
    if old_last < 0 and new_last < 0:
        return [field]
    parts = list[Difference]()
    if old_last < 0 or new_last < 0:
        return parts
    if old_first and new_first and not lexicon.has_message_break(field.before[-_ROLE_TOKENS:]):
        parts.append(Difference(field.old[:old_first], field.before, (start, start + new_first)))
    is_beginning = min(len(field.old) - old_last, len(new) - new_last) > _ROLE_TOKENS
    if is_beginning and not lexicon.has_message_break(tokens[end : end + 1]):
        before = field.old[: old_last + 1]
        parts.append(Difference(field.old[old_last + 1 :], before, (start + new_last + 1, end)))
    return parts
