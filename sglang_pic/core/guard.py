"""The guard of changed fields: no row that may have drawn on a field's old value is spliced behind its new one.

    prompt   [field][seam][ .... ][line that names it][ .... ][end)
    computed [field][seam]        [line that names it]  [tail of the prompt)
    spliced               [ .... ]                    [ ]

Rows that were computed behind spliced ones carry what those carried. Each splice behind a field that the text names
adds one to the rows' generation, and beyond `max_generation` rows are no donors. Where they would have served more than
the other rows that are not clean, only clean rows are spliced: this request makes clean rows again.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from sglang_pic.core.alignment import MAX_ALIGNED_FIELDS, Aligner, Alignment, Difference
from sglang_pic.core.key_order import KeyOrder
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.mentions import Mentions, find_mentions
from sglang_pic.core.plan import Context, CostModel, DropReason, Run
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.spans import Span, merge_spans, subtract_spans
from sglang_pic.core.tokens import Tokens, hold_media
from sglang_pic.core.trie import Node, Trie

# Fewer tokens between two spans that must be computed are computed too: a gap costs more.
_MIN_PIECE_TOKENS = 16
# Recorded sessions have at most 21 changed fields in a plan, and 27 runs. Runs behind more fields than these are
# computed: fields of one plan, and, counted once for each run behind it, fields of all runs.
_MAX_FIELDS = 512
_MAX_FIELDS_BEHIND = 8192
# A node on the way to the root, in tokens compared.
_WORK_PER_NODE = 4


class Guarded(NamedTuple):
    """What the guard left of a plan's runs."""

    runs: list[Run]
    changed_fields: tuple[Span, ...]
    """In the prompt; the place of a value that was removed is an empty span."""
    spans: tuple[Span, ...]
    """What it took away."""


class Guard:
    """The guard of one plan.

    Args:
        policy: `edit` decides what is computed.
        trie: the donors' paths.
        tokens: the prompt.
        lexicon: the texts of the tokens; without it everything behind a changed field is computed.
        cost: weighs what is left of a run that is cut.
    """

    def __init__(
        self,
        policy: ReusePolicy,
        *,
        trie: Trie,
        tokens: Tokens,
        lexicon: Lexicon | None,
        cost: CostModel | None,
    ) -> None:
        self._policy, self._tokens, self._lexicon, self._cost = policy, tokens, lexicon, cost
        self._aligner = Aligner(trie, tokens, policy.max_field_tokens)
        self._fields: dict[int, tuple[Difference, ...]] = {}
        self._key_order = KeyOrder(tokens, lexicon) if lexicon is not None and policy.edit != "in_place" else None
        # Serial of a node -> the generation that the nodes above it say; id of a field -> the field, and whether it is
        # no change of a value.
        self._above: dict[int, int] = {}
        self._judged: dict[int, tuple[Difference, bool]] = {}
        self._work = 0
        self._refused: list[Span] = []
        self.dropped: Counter[DropReason] = Counter()
        """What the guard left out."""

    @property
    def work(self) -> int:
        """Cost of looking for changed fields, in tokens compared."""
        return self._work + self._aligner.work

    def admits(self, node: Node, start: int, end: int, shift: int) -> bool:
        """Whether a donor's rows are clean enough to be spliced at `[start, end)`."""
        if self._policy.edit == "in_place":
            return True
        most = 0 if self._policy.edit == "recompile" else self._policy.max_generation
        if self._generation(node, end - shift) <= most:
            return True
        self._refused.append((start, end))
        self.dropped[DropReason.GENERATION] += 1
        return False

    def is_changed(self, node: Node, start: int, shift: int) -> bool:
        """Whether a field has another value before the donor of `[start, ...)` than in the prompt, and that matters."""
        return self._policy.edit != "in_place" and self._align(node, start, shift).context is Context.CHANGED

    def watch(self, run: Run, node: Node) -> Run | None:
        """Note what stands before a run that was chosen; the run with its context and its donor's generation.

        `None`, counted, where too many fields before it have another value.
        """
        alignment = self._align(node, run.target_start, run.shift)
        if len(alignment.fields) > MAX_ALIGNED_FIELDS:
            self.dropped[DropReason.BUDGET] += 1
            return None
        self._fields[run.target_start] = alignment.fields
        generation = self._generation(node, run.donor_end)
        return msgspec.structs.replace(run, context=alignment.context, generation=generation)

    def protect(self, runs: list[Run]) -> Guarded:
        """Cut out of the runs what has to be computed."""
        fields, watched = self._within_budget(runs)
        if not fields and not self._refused and len(watched) == len(runs):
            return Guarded(runs, (), ())
        notes = dict(zip(fields, self._must_compute([*fields.values()]), strict=True))
        behind = {run.target_start: [notes[field.key] for field in self._fields[run.target_start]] for run in watched}
        aged = [self._age(run, behind[run.target_start]) for run in watched]
        kept = [piece for run in self._renew(aged) for piece in self._cut(run, behind[run.target_start])]
        before, after = ([(run.target_start, run.target_end) for run in each] for each in (runs, kept))
        # A span that was removed is empty, and no less a change.
        changed_fields = tuple(sorted({field.new for field in fields.values()}))
        return Guarded(kept, changed_fields, tuple(subtract_spans(before, after)))

    def _within_budget(self, runs: list[Run]) -> tuple[dict[tuple[Span, bytes], Difference], list[Run]]:
        """The fields before the runs by their keys, and the runs behind no more of them than a plan may have."""
        fields: dict[tuple[Span, bytes], Difference] = {}
        watched, num_behind = [], 0
        for run in runs:
            before = self._fields[run.target_start]
            if not before:
                watched.append(run)
                continue
            added = {field.key: field for field in before} if num_behind + len(before) <= _MAX_FIELDS_BEHIND else None
            if added is None or len(fields) + sum(key not in fields for key in added) > _MAX_FIELDS:
                self.dropped[DropReason.BUDGET] += 1
                continue
            fields.update(added)
            num_behind += len(before)
            watched.append(run)
        return fields, watched

    def _generation(self, node: Node, end: int) -> int:
        """The changed fields that rows before position `end` of the path to `node` have behind them."""
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
        self._work += _WORK_PER_NODE * len(line)
        return max(above, node.generation(end))

    def _align(self, node: Node, start: int, shift: int) -> Alignment:
        found = self._aligner.align(node, start, shift)
        if self._lexicon is None or not 0 < len(found.fields) <= MAX_ALIGNED_FIELDS:
            return found
        fields = tuple(field for field in found.fields if not self._is_no_change(field, node, self._lexicon))
        return Alignment(Context.CHANGED, fields) if fields else Alignment(Context.MOVED)

    def _is_no_change(self, field: Difference, node: Node, lexicon: Lexicon) -> bool:
        """Whether the difference is no other value: messages differ, or their number, or only the order of keys."""
        known = self._judged.get(id(field))
        if known is None:
            sides = field.old, self._tokens[slice(*field.new)]
            is_none = any(map(lexicon.has_message_break, sides)) or (
                self._key_order is not None and self._key_order.alone_differs(field, node)
            )
            known = self._judged[id(field)] = field, is_none
        return known[1]

    def _must_compute(self, fields: list[Difference]) -> list[Mentions]:
        """For each field from where on it is named, and what of the prompt has to be computed because of it."""
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
            self.dropped[DropReason.BUDGET] += 1
            return [*map(self._all_behind, fields)]
        return [
            self._all_behind(field)
            # No word names an image that another one took the place of.
            if hold_media(field.old) and hold_media(self._tokens[slice(*field.new)])
            else named._replace(spans=[*named.spans, (field.new[1], field.new[1] + seam), tail])
            for field, named in zip(fields, found, strict=True)
        ]

    def _all_behind(self, field: Difference) -> Mentions:
        """Nobody can tell what draws on the field."""
        return Mentions(field.new[0], [(field.new[0], len(self._tokens))])

    def _age(self, run: Run, behind: list[Mentions]) -> Run:
        """The run with the generation of its rows where they are spliced: one more behind a field that is named."""
        if any(named.named_from < run.target_end for named in behind):
            return msgspec.structs.replace(run, generation=run.generation + 1)
        return run

    def _renew(self, runs: list[Run]) -> list[Run]:
        """The clean runs alone, where too old donors have more text than the rest: this request renews all of it."""
        lacking = subtract_spans(merge_spans(self._refused), [(run.target_start, run.target_end) for run in runs])
        clean = [run for run in runs if run.generation == 0]
        num_unclean = sum(run.num_tokens for run in runs) - sum(run.num_tokens for run in clean)
        if sum(end - start for start, end in lacking) <= num_unclean:
            return runs
        self.dropped[DropReason.GENERATION] += len(runs) - len(clean)
        return clean

    def _cut(self, run: Run, behind: list[Mentions]) -> list[Run]:
        """What of the run may be spliced."""
        if not behind:
            return [run]
        spans = merge_spans(span for named in behind for span in named.spans)
        pieces: list[Run] = []
        for start, end in subtract_spans([(run.target_start, run.target_end)], spans):
            is_cut = start != run.target_start
            if (is_cut or end != run.target_end) and not self._is_worth_it(end - start, start if is_cut else None):
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
        self.dropped[DropReason.CHANGED_FIELD] += not pieces
        return pieces

    def _is_worth_it(self, num_tokens: int, gap_start: int | None) -> bool:
        if num_tokens < _MIN_PIECE_TOKENS:
            return False
        return self._cost is None or self._cost.saves(num_tokens, gap_start) > 0
