"""Watches every KV row of a server: which token it was computed for, and that splices read and write the right ones.

A table beside the pool has a line for each slot. A pass writes it, in the order of the stream; the allocator empties
it when it hands the slot out. It reads the device at every pass, so it is for a CPU, whose stream is the program.

    token, position   for which the row was computed or spliced; -1 for a slot that was handed out and not yet written
    content           a hash of what a splice copies unchanged: the values, or MLA's latent
    is_computed       False for a row that came from a splice
    beside            likewise `content` of the same slot's row in each draft model

Layers with windows may have a pool and slots of their own, and a table of `content` by these: such rows may go earlier,
so only splices and loads are checked.

Errors are counted and logged, never raised.

NOTE: SGLang's KV canary (`--kv-canary`) cannot do this: it hashes each row with the row before it and its position, and
so reports every spliced row. Its sweep refuses every subclass of SGLang's radix tree.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang_pic.runtime.views import PoolView

if TYPE_CHECKING:
    from sglang_pic.adapter.sglang.seams import ModelRunner

logger = logging.getLogger(__name__)

_ATTRIBUTE = "pic_watched"
_MAX_LOGGED = 20
# Decoding reads the same rows again and again.
_CONTENT_EVERY = 8


class _Claim(NamedTuple):
    """The spliced rows of a batch, by its plans: `[num_spliced]` int64 each."""

    tokens: Tensor
    source_positions: Tensor
    positions: Tensor


class _Watched(NamedTuple):
    """A batch of requests between the two hooks: which tokens the slots of each row hold, and what is spliced."""

    rows: list[tuple[int, Tensor]]
    claim: _Claim | None
    is_extend: bool
    is_verified: bool
    """Whether its tokens are a draft's, whose rows replace those of tokens that were not accepted."""


class _Unchanged:
    """The part of a row that a splice copies unchanged.

    Args:
        view: the pool.
        in_windows: whether it is of the layers with windows, by slots of their pool, or of the others.
    """

    def __init__(self, view: PoolView, *, in_windows: bool) -> None:
        # Each layer as integers `[num_slots, width]`, and a factor for each.
        as_integers = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[view.dtype.itemsize]
        layers = frozenset() if view.windows is None else view.windows.layers
        parts = view.values or [keys[..., : view.rope_offset] for keys in view.keys]
        self.parts = [
            part.view(as_integers).flatten(1) for layer, part in enumerate(parts) if in_windows == (layer in layers)
        ]
        random = torch.Generator().manual_seed(0)
        self._factors = [
            torch.randint(1, 1 << 62, part.shape[1:], generator=random, dtype=torch.int64) * 2 + 1
            for part in self.parts
        ]

    def hashed(self, slots: Tensor) -> Tensor:
        """A hash of each row, `[num_slots]` int64."""
        total = torch.zeros(len(slots), dtype=torch.int64)
        for part, factors in zip(self.parts, self._factors, strict=True):
            total += (part[slots].to(torch.int64) * factors).sum(1)
        return total


class _Beside(NamedTuple):
    """Rows beside the target's whole ones."""

    what: str
    runner: ModelRunner
    """Whose passes write them."""
    unchanged: _Unchanged
    content: Tensor
    table: Tensor | None = None
    """Their slots by those of the whole rows; None for the same ones."""

    def places(self, slots: Tensor) -> Tensor:
        """Where the rows beside those of `slots` are."""
        return slots if self.table is None else self.table[slots].to(torch.int64)

    def note(self, slots: Tensor) -> Tensor:
        """Record the rows of `slots` as right, and return their hashes."""
        places = self.places(slots)
        self.content[places] = hashed = self.unchanged.hashed(places)
        return hashed


def whole_allocator(runner: Any) -> Any:
    """The allocator of the slots that a request's row has, where windows have another."""
    allocator = runner.token_to_kv_pool_allocator
    return getattr(allocator, "full_attn_allocator", allocator)


class RowWatch:
    """The table of one scheduler rank; its methods are hooks."""

    def __init__(
        self, view: PoolView, runner: ModelRunner, drafts: Sequence[tuple[ModelRunner, PoolView]] = ()
    ) -> None:
        self._view, self._runner = view, runner
        self._token = torch.full((view.num_slots,), -1, dtype=torch.int64)
        self._position = self._token.clone()
        self._content = torch.zeros(view.num_slots, dtype=torch.int64)
        self._is_computed = torch.zeros(view.num_slots, dtype=torch.bool)
        self._hash = _Unchanged(view, in_windows=False).hashed
        models = [("the model", runner, view), *(("a draft", *draft) for draft in drafts)]
        self._beside = [
            _Beside(what, each, rows, self._content.clone())
            for what, each, of_draft in models[1:]
            if (rows := _Unchanged(of_draft, in_windows=False)).parts
        ]
        self._windows = [
            _Beside(
                f"{what}'s window",
                each,
                _Unchanged(of_model, in_windows=True),
                self._content.new_zeros(of_model.windows.num_slots),
                of_model.windows.slots,
            )
            for what, each, of_model in models
            if of_model.windows is not None
        ]
        self._host: list[Tensor] = []
        """The table of a host pool (HiCache), once rows were copied there."""
        self._host_windows: list[Tensor] = []
        """Likewise of that for windows."""
        self._stored: dict[str, bytes] = {}
        """Likewise of pages in a store, as bytes: there are many, and a tensor is a kilobyte."""
        self._laid_out: _Claim | None = None
        self._claim: _Claim | None = None
        self._moved_ahead = torch.empty(0, dtype=torch.int64)
        self._num_passes = self._num_reports = 0
        self.found: Counter[str] = Counter()
        """Counts of wrong rows, by the kind of error."""
        self.num_spliced = 0
        self.num_fetched = 0

    def on_alloc(self, slots: Tensor | None, *_: object, **__: object) -> None:
        """After the allocator has handed out slots."""
        if slots is not None:
            self._token[slots.to(torch.int64)] = -1

    def on_clear(self, *_: object, **__: object) -> None:
        """After the pool was emptied."""
        self._token.fill_(-1)

    def lay_out(self, _gap: object, _path: object, plans: Sequence[Any], batch: Any, *_: object) -> None:
        """After the splices of a batch were laid out: the rows that their plans name, in the order of the splice."""
        tokens: list[int] = []
        sources: list[int] = []
        positions: list[int] = []
        planned = zip(batch.reqs, plans, strict=True)
        pieces = [(req, piece) for req, plan in planned if plan is not None for piece in plan.pieces]
        # As the splice has them: what is read from the host follows all that is read from the device.
        for req, piece in sorted(pieces, key=lambda each: each[1].place):
            tokens += req.full_untruncated_fill_ids[piece.start : piece.end]
            sources += range(piece.start - piece.run.shift, piece.end - piece.run.shift)
            positions += range(piece.start, piece.end)
        self._laid_out = _Claim(torch.tensor(tokens), torch.tensor(sources), torch.tensor(positions))

    def prepare(
        self, _result: None, _path: object, forward_batch: Any, _cls: object, batch: Any, runner: Any, **_: object
    ) -> None:
        """After a batch of requests was made for its pass of the target model."""
        mode = batch.forward_mode
        if runner is not self._runner or not (mode.is_extend() or mode.is_decode()):
            return
        claim, self._laid_out = self._laid_out, None
        is_extend = mode.is_extend_without_speculative()
        if is_extend:
            lens = batch.prefix_lens
        else:
            # A pass that verifies a draft's tokens computes rows for all of them.
            lens = (
                batch.seq_lens.tolist()
                if mode.is_target_verify()
                else [n - 1 for n in forward_batch.seq_lens_cpu.tolist()]
            )
        rows = []
        for req, num_tokens in zip(batch.reqs, lens, strict=True):
            # The last token of an answer may still be on the device only.
            known = [*req.origin_input_ids, *req.output_ids][:num_tokens]
            rows.append((int(req.kv.req_pool_idx), torch.tensor(known, dtype=torch.int64)))
        setattr(forward_batch, _ATTRIBUTE, _Watched(rows, claim, is_extend, mode.is_target_verify()))

    def forward(
        self, original: Callable[..., Any], path: Any, inner: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around a pass: what it reads is right, what it writes was handed out for it."""
        watched: _Watched | None = getattr(batch, _ATTRIBUTE, None)
        self._claim = None
        slots = batch.out_cache_loc.to(torch.int64)
        if runner is not self._runner:
            output = original(path, inner, runner, batch, *args, **kwargs)
            self._note_beside(slots, runner)
            return output
        if watched is not None:
            delattr(batch, _ATTRIBUTE)
            self._num_passes += 1
            self._check_rows(watched)
            # Ranks that gather tokens move the rows of a batch before its pass.
            is_foreign = (self._token[slots] != -1) & ~torch.isin(slots, self._moved_ahead)
            if watched.is_verified:
                is_foreign &= self._position[slots] != batch.positions
            self._report("written while owned by others", is_foreign | self._is_free(slots), slots)
            self._claim, self._moved_ahead = watched.claim, self._moved_ahead[:0]
        # The pass pads them where ranks gather tokens, and overwrites the ids of images.
        input_ids, positions = batch.input_ids.clone(), batch.positions.clone()
        output = original(path, inner, runner, batch, *args, **kwargs)
        if watched is None:
            # Of no request, in borrowed slots. Those of the first page are nobody's.
            held = (self._token[slots] != -1) & (slots >= self._view.page_size)
            self._report("written by a pass of no request", held, slots)
        kept = slice(None) if self._claim is None else self._token[slots] == -1
        fresh = slots[kept]
        self._token[fresh], self._position[fresh] = input_ids[kept].to(torch.int64), positions[kept].to(torch.int64)
        self._content[fresh], self._is_computed[fresh] = self._hash(fresh), True
        self._note_beside(fresh, runner)
        self._claim = None
        return output

    def _note_beside(self, slots: Tensor, runner: Any) -> None:
        for each in (*self._beside, *self._windows):
            if each.runner is runner:
                each.note(slots)

    def move_rows(self, original: Callable[..., None], path: Any, gap: Any) -> None:
        """Around a splice: its sources are the rows that the plans mean, and its targets get their content."""
        claim, read, fetch = self._claim or self._laid_out, gap.reads.splice, gap.reads.fetch
        src, dst, shifts = read.src, read.dst, read.shifts
        if claim is None or not len(claim.tokens):
            original(path, gap)
            return
        windows = self._windows_read(read, fetch)
        table, content, is_free = [column[src] for column in self._table], self._hash(src), self._is_free(src)
        if fetch is not None and len(fetch.src):
            there = [column[fetch.src] for column in self._host]
            table = [torch.cat(pair) for pair in zip(table, there, strict=True)]
            content = torch.cat([content, there[2]])
            is_free = torch.cat([is_free, torch.zeros(len(there[2]), dtype=torch.bool)])
            fetched = slice(len(fetch.dst) - len(there[2]), None)
            src, dst = torch.cat([src, fetch.src]), torch.cat([dst, fetch.dst[fetched]])
            shifts = torch.cat([shifts, fetch.shifts[fetched]])
        self.num_fetched += 0 if fetch is None else len(fetch.dst)
        token, position, held, is_computed, *beside = table
        self.num_spliced += src.numel()
        other = (token != claim.tokens) | (position != claim.source_positions)
        self._report("spliced from a freed slot", is_free, src)
        self._report("spliced from another token's row", other & ~is_free, src)
        self._report("spliced from a row that changed", (held != content) & ~other & ~is_free, src)
        self._report("spliced from a spliced row", ~is_computed & ~other & ~is_free, src)
        for each, was in zip(self._beside, beside, strict=True):
            here = each.unchanged.hashed(read.src)
            self._report(f"spliced from {each.what}'s row that changed", here != was[: len(here)], read.src)
            was[: len(here)] = here
        if self._claim is None:
            self._report("written while owned by others", (self._token[dst] != -1) | self._is_free(dst), dst)
        original(path, gap)
        # With M-RoPE an image advances positions by less than its tokens, and rows turn by another distance.
        if not self._runner.model_config.model_is_mrope:
            self._report("turned too far or too little", shifts != claim.positions - claim.source_positions, dst)
        self._token[dst], self._position[dst] = claim.tokens, claim.positions
        self._content[dst], self._is_computed[dst] = self._hash(dst), False
        self._report("copied wrongly", self._content[dst] != content, dst)
        for each, was in zip((*self._beside, *self._windows), (*beside, *windows), strict=True):
            self._report(f"copied wrongly from {each.what}'s row", each.note(dst) != was, dst)
        if self._claim is None:
            self._moved_ahead = dst

    def _windows_read(self, read: Any, fetch: Any) -> list[Tensor]:
        """What the tables say of the window rows that a splice reads, in its order; on the device they are checked."""
        found = []
        for number, each in enumerate(self._windows):
            here = each.places(read.src) if read.windows is None else read.windows
            changed = each.unchanged.hashed(here) != each.content[here]
            self._report(f"spliced from {each.what}'s row that changed", changed, here)
            fetched = [] if fetch is None else [self._host_windows[number][fetch.windows]]
            found.append(torch.cat([each.content[here], *fetched]))
        return found

    def copied(self, original: Callable[..., Any], engine: Any, transfers: Any, *, to_host: bool, **kwargs: Any) -> Any:
        """Around SGLang's copies between the device and the host, which take what the table says along."""
        result = original(engine, transfers, **kwargs)
        for transfer in transfers:
            host, device = (each.to("cpu", torch.int64) for each in (transfer.host_indices, transfer.device_indices))
            tables, on_host, content, hashed = self._table, self._host, self._content, self._hash
            if transfer.is_draft:  # A row of each head, whose table goes with its target's.
                continue
            if transfer.device_pool is getattr(self._runner.token_to_kv_pool, "swa_kv_pool", None):
                content, hashed = self._windows[0].content, self._windows[0].unchanged.hashed
                tables, on_host = tuple(each.content for each in self._windows), self._host_windows
            if not on_host:
                on_host += [column.new_zeros(int(transfer.host_pool.size)) for column in tables]
            for here, there in zip(tables, on_host, strict=True):
                if to_host:
                    there[host] = here[device]
                else:
                    here[device] = there[host]
            if not to_host:
                self._report("loaded wrongly", content[device] != hashed(device), device)
        return result

    def stored(self, original: Callable[..., bool], controller: Any, pages: Any, slots: Tensor, *args: Any) -> bool:
        """Around writing pages of the host to a store, which keeps what it has of them."""
        fresh = [not controller.storage_backend.exists(page) for page in pages]
        is_stored = original(controller, pages, slots, *args)
        if is_stored:
            for page, of_page, is_fresh in zip(pages, slots.split(self._view.page_size), fresh, strict=True):
                if is_fresh:
                    self._stored[page] = (
                        torch.stack([column[of_page].long() for column in self._host]).numpy().tobytes()
                    )
        return is_stored

    def read_back(
        self, original: Callable[..., int], controller: Any, operation: Any, pages: Any, slots: Tensor, *args: Any
    ) -> int:
        """Around reading pages from a store to the host."""
        num_pages = original(controller, operation, pages, slots, *args)
        for page, of_page in zip(pages[:num_pages], slots.split(self._view.page_size), strict=False):
            if self._host and page in self._stored:
                kept = torch.frombuffer(bytearray(self._stored[page]), dtype=torch.int64).view(len(self._host), -1)
                for column, values in zip(self._host, kept, strict=True):
                    column[of_page] = values.to(column.dtype)
        return num_pages

    @property
    def _table(self) -> tuple[Tensor, ...]:
        return self._token, self._position, self._content, self._is_computed, *(each.content for each in self._beside)

    def check_slots(self, slots: Tensor, tokens: Tensor | None, positions: Tensor) -> int:
        """How many of `slots` lack the rows written for `tokens` at `positions`; counted as found, too."""
        wrong = self._position[slots] != positions
        if tokens is not None:
            wrong |= self._token[slots] != tokens
        changed = (self._content[slots] != self._hash(slots)) & ~wrong
        self._report("in the tree for another token", wrong, slots)
        self._report("in the tree and changed", changed, slots)
        return int((wrong | changed).sum())

    def is_computed(self, slots: Tensor) -> Tensor:
        """Which of `slots` hold rows that were not spliced."""
        return self._is_computed[slots]

    def _check_rows(self, watched: _Watched) -> None:
        table = self._runner.req_to_token_pool.req_to_token
        with_content = watched.is_extend or self._num_passes % _CONTENT_EVERY == 0
        for row, tokens in watched.rows:
            slots = table[row, : len(tokens)].to(torch.int64)
            wrong = (self._token[slots] != tokens) | (self._position[slots] != torch.arange(len(tokens)))
            self._report("read for another token", wrong, slots)
            self._report("read from a freed slot", self._is_free(slots) & ~wrong, slots)
            if with_content:
                self._report("read after it changed", (self._content[slots] != self._hash(slots)) & ~wrong, slots)

    def _is_free(self, slots: Tensor) -> Tensor:
        allocator, page_size = whole_allocator(self._runner), self._view.page_size
        free = [allocator.get_all_free_pages(), *(group // page_size for group in allocator.free_group or ())]
        return torch.isin(slots // page_size, torch.cat(free))

    def _report(self, what: str, wrong: Tensor, slots: Tensor) -> None:
        if not (count := int(wrong.sum())):
            return
        self._num_reports += 1
        if self._num_reports <= _MAX_LOGGED:
            logger.error("sglang_pic: %d rows %s, the first in slot %d", count, what, int(slots[wrong][0]))
        self.found[what] += count
