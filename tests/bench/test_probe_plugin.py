"""The experiments' plugin. The soak's table of rows: what is spliced, read and written rightly is not found, what is
not is. Faults and records: keys left unrotated and rows corrupted, of the requests that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pic_bench.probe_plugin.options import ProbedOptions, RequestProbe
from pic_bench.probe_plugin.plugin import _Faults
from pic_bench.probe_plugin.recorder import Recorder
from pic_bench.probe_plugin.row_watch import RowWatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.adapter.serve.rows import Splice
from sglang_pic.adapter.serve.state import PendingSplice, RequestState
from sglang_pic.core import Path, Plan, Run, as_tokens
from sglang_pic.runtime.views import PoolKind, PoolView
from tests.helpers.builders import request, splice

DONOR, READER, END = list(range(100, 112)), list(range(500, 504)), [7, 8]
"""Tokens of a donor, and what a prompt has before and behind them."""
DONOR_SLOTS, READER_SLOTS = torch.arange(1, 13), torch.arange(15, 31)
EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY


class Server:
    """A pool of 63 slots and a model that writes rows of its own for every token."""

    def __init__(self) -> None:
        keys, values = torch.zeros(64, 1, 4), torch.zeros(64, 1, 4)
        self.view = PoolView(PoolKind.MHA, (keys,), (values,), torch.float32, 64, 1, 0, 4, 0)
        self.table = torch.zeros(4, 32, dtype=torch.int32)
        self.allocator = SimpleNamespace(free_group=None, free=torch.arange(31, 64))
        self.allocator.get_all_free_pages = lambda: self.allocator.free
        self.turned_by: int | None = None
        self.runner: Any = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            model_config=SimpleNamespace(model_is_mrope=False),
        )
        self.draft: Any = SimpleNamespace()
        of_draft = replace(self.view, keys=(keys.clone(),), values=(values.clone(),))
        self.draft_rows = of_draft.values[0]
        self.watch = RowWatch(self.view, self.runner, [(self.draft, of_draft)])

    def compute(
        self, row: int, tokens: list[int], slots: torch.Tensor, splice: tuple[Run, torch.Tensor] | None = None
    ) -> None:
        """Prefill a request whose row has those slots, with at most one run."""
        self.table[row, : len(tokens)] = slots.to(torch.int32)
        req = self._request(row, tokens)
        batch = SimpleNamespace(reqs=[req], prefix_lens=[0], forward_mode=EXTEND)
        gap = None
        self.watch.on_alloc(slots, None)
        if splice is not None:
            run, src = splice
            dst = slots[run.target_start : run.target_end]
            shifts = torch.full_like(dst, self.turned_by or run.shift)
            moved = SimpleNamespace(src=src, dst=dst, shifts=shifts, windows=None)
            gap = SimpleNamespace(reads=SimpleNamespace(splice=moved, fetch=None))
            plan = PendingSplice.on_device(Plan(prefix_len=0, end=len(tokens), runs=(run,)), [src])
            self.watch.lay_out(gap, None, [plan], batch, None)
        self._pass(batch, gap, slots, torch.tensor(tokens), torch.arange(len(tokens)))
        self.draft_pass(slots)

    def draft_pass(self, slots: torch.Tensor) -> None:
        """The draft model computes its rows of some slots."""

        def compute(*_: object) -> None:
            self.draft_rows[slots] = torch.rand(len(slots), 1, 4)

        self.watch.forward(compute, None, None, self.draft, SimpleNamespace(out_cache_loc=slots))

    def verify(self, row: int, tokens: list[int], drafted: list[int], slots: torch.Tensor) -> None:
        """Compute rows for what the draft says comes behind `tokens`."""
        self.table[row, len(tokens) : len(tokens) + len(slots)] = slots.to(torch.int32)
        lens = torch.tensor([len(tokens)])
        batch = SimpleNamespace(reqs=[self._request(row, tokens)], forward_mode=VERIFY, seq_lens=lens)
        self._pass(batch, None, slots, torch.tensor(drafted), torch.arange(len(slots)) + len(tokens))

    def reuse(self) -> None:
        """Prefill a prompt with the donor's rows but the first two in its middle."""
        self.compute(2, [*READER, *DONOR[2:], *END], READER_SLOTS, (run(4, 14, donor_start=2), DONOR_SLOTS[2:]))

    def decode(self, row: int, tokens: list[int], slot: int) -> None:
        """Compute the row of one more token behind `tokens`."""
        self.watch.on_alloc(torch.tensor([slot]), None)
        self.table[row, len(tokens)] = slot
        batch = SimpleNamespace(reqs=[self._request(row, tokens)], forward_mode=DECODE)
        self._pass(batch, None, torch.tensor([slot]), torch.tensor([5]), torch.tensor([len(tokens)]))

    def _request(self, row: int, tokens: list[int]) -> Any:
        ids = {"origin_input_ids": tokens, "output_ids": [], "full_untruncated_fill_ids": tokens}
        return SimpleNamespace(**ids, rid=f"row {row}", retraction_count=0, kv=SimpleNamespace(req_pool_idx=row))

    def _pass(self, batch: Any, gap: Any, slots: torch.Tensor, input_ids: torch.Tensor, at: torch.Tensor) -> None:
        fields = {"out_cache_loc": slots, "input_ids": input_ids, "positions": at, "seq_lens_cpu": at[-1:] + 1}
        forward_batch = SimpleNamespace(**fields)
        self.watch.prepare(None, None, forward_batch, None, batch, self.runner)
        self.watch.forward(self._forward, gap, None, self.runner, forward_batch)

    def _forward(self, gap: Any, _inner: object, _runner: object, batch: Any) -> None:
        computed = batch.out_cache_loc
        if gap is not None:
            self.watch.move_rows(self._move, None, gap)
            computed = computed[~torch.isin(computed, gap.reads.splice.dst)]
        self.view.values[0][computed] = torch.rand(len(computed), 1, 4)

    def _move(self, _path: object, gap: Any) -> None:
        for rows in (self.view.values[0], self.draft_rows):
            rows[gap.reads.splice.dst] = rows[gap.reads.splice.src]


@pytest.fixture
def server() -> Server:
    """One that has computed the donor."""
    made = Server()
    made.compute(1, DONOR, DONOR_SLOTS)
    assert not made.watch.found
    return made


def run(start: int, end: int, *, donor_start: int) -> Run:
    """A run into the target span `[start, end)`."""
    donor = Path("donor", [as_tokens(DONOR)])
    return Run(target_start=start, target_end=end, donor_start=donor_start, donor=donor, seam_len=0)


def free_donor(server: Server) -> None:
    server.allocator.free = torch.cat([server.allocator.free, DONOR_SLOTS])


def damage_donor(server: Server) -> None:
    server.view.values[0][DONOR_SLOTS[5]] += 1


def rewrite_donor(tokens: list[int]) -> Callable[[Server], None]:
    return lambda server: server.compute(3, tokens, DONOR_SLOTS)


def splice_donor(server: Server) -> None:
    """The donor's rows came from a splice themselves."""
    other = torch.arange(44, 56)
    server.compute(2, DONOR, other)
    server.compute(3, DONOR, DONOR_SLOTS, (run(2, 12, donor_start=2), other[2:]))


def keep_target(server: Server) -> None:
    """The slots of the prompt belong to somebody else, and the allocator did not hand them out."""
    server.compute(3, [9] * 16, READER_SLOTS)
    server.watch.on_alloc = lambda *_: None  # type: ignore[method-assign]


def turn_further(server: Server) -> None:
    """As behind an image, which has more tokens than positions."""
    server.turned_by = 1


def turn_behind_an_image(server: Server) -> None:
    server.runner.model_config.model_is_mrope, server.turned_by = True, 1


def copy_nothing(server: Server) -> None:
    server._move = lambda *_: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (None, {}),
        (free_donor, {"spliced from a freed slot": 10}),
        (rewrite_donor([9] * 12), {"spliced from another token's row": 10}),
        # The donor's tokens stand a place further than the plan says.
        (rewrite_donor([1, *DONOR[:11]]), {"spliced from another token's row": 10}),
        (lambda server: server.watch.on_alloc(DONOR_SLOTS, None), {"spliced from another token's row": 10}),
        (damage_donor, {"spliced from a row that changed": 1}),
        (splice_donor, {"spliced from a spliced row": 10}),
        (keep_target, {"written while owned by others": 16}),
        (turn_further, {"turned too far or too little": 10}),
        (turn_behind_an_image, {}),
        (copy_nothing, {"copied wrongly": 10, "copied wrongly from a draft's row": 10}),
    ],
)
def test_a_splice_reads_and_writes_its_own_rows(
    server: Server, fault: Callable[[Server], None] | None, found: dict[str, int]
) -> None:
    if fault is not None:
        fault(server)
        server.watch.found.clear()
    server.reuse()
    assert dict(server.watch.found) == found
    assert server.watch.is_computed(READER_SLOTS).tolist() == [True] * 4 + [False] * 10 + [True] * 2


def test_the_next_pass_reads_the_rows_of_its_request(server: Server) -> None:
    server.decode(1, DONOR, 13)
    assert not server.watch.found
    server.table[1, 3] = 5
    server.decode(1, [*DONOR, 5], 14)
    assert dict(server.watch.found) == {"read for another token": 1}


def test_rows_in_the_tree_are_those_that_were_written(server: Server) -> None:
    def num_wrong(tokens: torch.Tensor | None, shift: int = 0) -> int:
        return server.watch.check_slots(DONOR_SLOTS, tokens, torch.arange(12) + shift)

    assert num_wrong(torch.tensor(DONOR)) == 0
    assert num_wrong(torch.tensor(DONOR), shift=1) == 12
    damage_donor(server)
    assert num_wrong(None) == 1
    server.watch.on_clear()
    assert num_wrong(torch.tensor(DONOR)) == 12


def probed(probe: RequestProbe | None = None, **fields: Any) -> Any:
    """A request, of an experiment if `probe` is given."""
    options = RequestOptions() if probe is None else ProbedOptions(probe=probe)
    return request(range(4), pic=RequestState(options), **fields)


def test_faults_are_of_the_requests_that_ask_for_them() -> None:
    reqs = [probed(RequestProbe(rotate=False)), probed(), probed(RequestProbe(flip_donors=True)), probed()]
    plans = [splice(4, 20, (6, 12, -3)), None, splice(0, 9, (1, 3, 5)), splice(0, 9, (2, 4, 6))]
    rows = [torch.arange(100 * n, 100 * n + 64) for n in range(1, 5)]
    gap = build_gap_batch(plans, [4, 0, 0, 0], [16, 5, 9, 9], [16, 5, 9, 9], rows, torch.device("cpu"))
    keys = torch.ones(1000, 1)
    path = SimpleNamespace(splicer=SimpleNamespace(view=SimpleNamespace(places=lambda slots: [(keys, slots)])))
    faults = _Faults()
    faults.lay_out(gap, path, plans, SimpleNamespace(reqs=reqs), None)
    assert gap.reads.splice.shifts.tolist() == [0] * 6 + [5] * 2 + [6] * 2
    faults.move_rows(None, path, gap)
    assert (keys < 0).nonzero()[:, 0].tolist() == [301, 302]
    faults.move_rows(None, path, gap)
    assert int((keys < 0).sum()) == 2, "a later splice is not corrupted"
    gap.reads.fetch = Splice(torch.tensor([1, 2]), torch.tensor([501, 502]), torch.tensor([6, 6]))
    faults.lay_out(gap, path, plans[2:3], SimpleNamespace(reqs=reqs[2:3]), None)
    faults.move_rows(None, path, gap)
    assert {501, 502} <= set((keys < 0).nonzero()[:, 0].tolist()), "rows of the host, too"
    keys = torch.ones(1000, 1, dtype=torch.float8_e4m3fn)
    faults.lay_out(gap, path, plans[2:3], SimpleNamespace(reqs=reqs[2:3]), None)
    faults.move_rows(None, path, gap)
    assert keys.float()[501].item() == -1


def test_a_recording_is_whole(tmp_path: FilePath, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "records")
    req = probed(RequestProbe(record="one"))
    told = recorder.watch(SimpleNamespace(reqs=[req]))
    assert told is not None
    for start in (0, 3):
        recorder.keep(torch.arange(start, start + 3))
    told("the runner's output")
    recorder.keep(torch.zeros(3))
    with np.load(tmp_path / "records" / "one.npz") as arrays:
        assert arrays["logits"].tolist() == [0, 1, 2, 3, 4, 5]
    req.extend_end = 3
    assert recorder.watch(SimpleNamespace(reqs=[req])) is None, "a chunk that ends earlier"
    assert recorder.watch(SimpleNamespace(reqs=[probed(rid="other"), req])) is None
    assert "shares its batch" in caplog.text
