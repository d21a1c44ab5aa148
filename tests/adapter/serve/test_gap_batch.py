"""The layout of a gap prefill, and of a draft's beside it: virtual sequences, kept tokens, slots of the splice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pic_platform.pageable import without_pinned_memory
from sglang.srt.lora.backend import lora_registry as backends
from sglang.srt.lora.lora_manager import LoRAManager

from sglang_pic.adapter.features.window_rows import WindowTier
from sglang_pic.adapter.probe.copies import keep_until_read
from sglang_pic.adapter.serve.draft_passes import narrowed_fields
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.rows import ON_DEVICE, Place
from sglang_pic.adapter.serve.state import PendingSplice
from tests.helpers.builders import BareRunner, extend_batch, plan, request_state, splice


def test_mixed_batch_layout() -> None:
    """Two requests with runs around one without; every list checked by hand."""
    released: list[str] = []
    first = splice(4, 20, (6, 12, -3), slots=894)
    last = PendingSplice.on_device(plan(0, 9, (1, 3, 5), (3, 7, 8)), [torch.tensor([70, 71]), torch.arange(50, 54)])
    for each, name in ((first, "a"), (last, "b"), (last, "c")):
        each.locks.callback(released.append, name)
    rows = [torch.arange(100, 164), torch.arange(200, 264), torch.arange(300, 364)]
    gap = build_gap_batch([first, None, last], [4, 10, 0], [16, 5, 9], [13, 2, 9], rows, torch.device("cpu"))

    assert gap.owners == [0, 0, 1, 2, 2]
    assert gap.prefix_lens == [4, 12, 10, 0, 7]
    assert gap.seq_lens == [6, 20, 15, 1, 9]
    assert gap.kept.tolist() == [0, 1, *range(8, 16), *range(16, 21), 21, 28, 29]
    assert gap.computed_lens == [10, 5, 3]
    assert gap.start_lens == [7, 2, 3], "the last 3, the last 3 and none of their tokens want logprobs"
    assert gap.reads.splice.src.tolist() == [*range(900, 906), 70, 71, *range(50, 54)]
    assert gap.reads.splice.dst.tolist() == [*range(106, 112), 301, 302, 303, 304, 305, 306]
    assert gap.reads.splice.shifts.tolist() == [-3] * 6 + [5] * 2 + [8] * 4
    gap.locks.close()
    gap.locks.close()
    assert sorted(released) == ["a", "b", "c"], "each donor is unlocked once"


def test_window_slots_are_those_of_the_plan() -> None:
    """Read while the donors were locked; of a run that a chunk cuts short the first ones."""
    first, last = splice(4, 20, (6, 12, -3)), splice(0, 9, (1, 3, 5), (3, 7, 8))
    windows = {0: [torch.arange(30, 36)], 1: [torch.tensor([50, 51]), torch.arange(60, 64)]}
    for at, each in enumerate((first, last)):
        each.pieces = [piece._replace(windows=own) for piece, own in zip(each.pieces, windows[at], strict=True)]
        each.tier = WindowTier(None, torch.arange(1_000), ON_DEVICE)  # type: ignore[arg-type]
    last.clip(6)
    rows = [torch.arange(100, 164), torch.arange(200, 264), torch.arange(300, 364)]
    gap = build_gap_batch([first, None, last], [4, 10, 0], [16, 5, 6], [16, 5, 6], rows, torch.device("cpu"))
    assert gap.reads.splice.windows is not None
    assert gap.reads.splice.windows.tolist() == [*range(30, 36), 50, 51, 60, 61]
    assert len(gap.reads.splice.src) == len(gap.reads.splice.windows)


def test_a_run_without_rows_is_an_error() -> None:
    pending = splice(0, 9, (1, 3, 5), (3, 7, 8))
    del pending.pieces[-1]
    with pytest.raises(ValueError, match="pieces of 2 tokens for a plan that splices 6"):
        build_gap_batch([pending], [0], [9], [9], [torch.arange(64)], torch.device("cpu"))


def test_slots_stay_until_the_pass_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device they lie in memory of the scheduler's stream, and the batch is laid out on the stream of the pass."""
    used: list[tuple[torch.Tensor, object]] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *used_by: used.append(used_by))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "of the pass")
    keep_until_read(slots := torch.arange(3))
    assert used == [(slots, "of the pass")]


def test_a_batch_without_runs_is_laid_out_as_it_is() -> None:
    gap = build_gap_batch([None, None], [4, 0], [3, 2], [3, 2], [], torch.device("cpu"))
    assert (gap.prefix_lens, gap.seq_lens, gap.kept.tolist()) == ([4, 0], [7, 2], [0, 1, 2, 3, 4])
    assert all(each.numel() == 0 for each in (gap.reads.splice.src, gap.reads.splice.dst, gap.reads.splice.shifts))


def test_media_go_with_the_tokens_that_are_computed() -> None:
    """Of the second request's media its own sequence must know, and its tokens what kind they are.

    The last test shows the same of adapters.
    """
    spliced = splice(0, 20, (6, 12, -3))
    rows = [torch.arange(100, 164), torch.arange(200, 264)]
    gap = build_gap_batch([spliced, None], [0, 10], [20, 5], [20, 5], rows, torch.device("cpu"))
    media = {"mm_inputs": [None, "image"], "mm_token_modalities": torch.tensor([0] * 20 + [1] * 5)}
    slots = torch.cat([rows[0][:20], rows[1][10:15]])
    batch = extend_batch([20, 5], prefix_lens=[0, 10], rows=[1, 2], out_cache_loc=slots, **media)
    with gap.narrowed(batch, BareRunner(1)):  # type: ignore[arg-type]
        assert batch.mm_inputs == [None, None, "image"]
        assert batch.mm_token_modalities.tolist() == [0] * 14 + [1] * 5
        assert batch.extend_seq_lens.tolist() == [6, 8, 5]
    assert (batch.batch_size, batch.mm_inputs) == (2, [None, "image"])


def test_a_draft_embeds_no_token_of_an_image_itself() -> None:
    """It embeds what follows each gap; where that is a run's image, SGLang's value for it is no token."""
    image, rows = 1_000_000, [torch.arange(100, 164), torch.arange(200, 264)]
    gap = build_gap_batch(
        [splice(0, 20, (6, 12, -3), (14, 16, -3)), None], [0, 10], [20, 5], [20, 5], rows, torch.device("cpu")
    )
    # As SGLang shifts them by one: the run at 6 begins with an image, and the second request has one in its middle.
    shifted = torch.arange(1, 26)
    shifted[5:11] = shifted[21:23] = image
    embeddings = torch.arange(50.0).view(25, 2)
    slots = torch.cat([rows[0][:20], rows[1][10:15]])
    batch = extend_batch(
        [20, 5], prefix_lens=[0, 10], rows=[1, 2], out_cache_loc=slots, input_ids=shifted, mm_input_embeds=embeddings
    )
    runner: Any = BareRunner(1)
    with gap.narrowed(batch, runner, narrowed_fields(gap, batch, runner)):
        kept = [*range(6), 12, 13, *range(16, 25)]
        assert torch.equal(batch.mm_input_embeds, embeddings[kept])
        assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 0, 13, 14, 17, 18, 19, 20, 21, image, image, 24, 25]
    assert (batch.input_ids is shifted, batch.mm_input_embeds is embeddings) == (True, True)


_SLOTS = {None: 0, "one": 1, "two": 2}


@pytest.fixture
def pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's tables lie in pinned memory, which only an accelerator's driver gives."""
    for owner, name in ((torch.Tensor, "pin_memory"), (torch, "tensor"), (torch, "empty"), (torch, "zeros")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    without_pinned_memory()


def make_manager(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's manager of adapters, as far as it prepares a batch."""
    kind = backends.get_backend_from_name(name)
    chunked = SimpleNamespace(max_lora_chunk_size=16)
    monkeypatch.setattr("sglang.srt.lora.backend.chunked_backend.get_lora", lambda: chunked)
    manager = LoRAManager.__new__(LoRAManager)
    manager.lora_backend = kind(max_loras_per_batch=3, device=torch.device("cpu"), server_args=None)
    manager.attn_dp_enabled, manager.max_loras_per_batch = False, 3
    manager.memory_pool = SimpleNamespace(uid_to_buffer_id=_SLOTS, get_buffer_id=_SLOTS.__getitem__)
    manager.loras = {name: SimpleNamespace(config=SimpleNamespace(r=8), scaling=1.0) for name in ("one", "two")}
    return manager


def slots_of_tokens(info: Any, num_tokens: int) -> list[int]:
    """For each token of the batch, the place of its adapter's weights."""
    bounds, slots = info.seg_indptr.tolist(), info.weight_indices.tolist()
    found = [-1] * num_tokens
    order = range(num_tokens) if info.permutation is None else info.permutation.tolist()
    for i in range(info.num_segments):
        for place in range(bounds[i], bounds[i + 1]):
            found[order[place]] = slots[i]
    return found


@pytest.mark.usefixtures("pageable")
@pytest.mark.parametrize("name", ["torch_native", "csgmv", "triton"])
def test_each_computed_token_has_its_requests_adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, adapters = [60, 20, 40, 9], ["one", None, "two", "one"]
    pending = [splice(0, 60, (5, 20, 0), (30, 41, 0)), None, splice(0, 40, (0, 33, 0)), None]
    rows = [torch.arange(64 * i, 64 * i + 64) for i in range(4)]
    gap = build_gap_batch(pending, [0] * 4, lens, lens, rows, torch.device("cpu"))
    batch = extend_batch(lens, lora_ids=[*adapters])
    manager = make_manager(name, monkeypatch)
    runner: Any = BareRunner(1)
    runner.lora_manager = manager
    manager.prepare_lora_batch(batch)
    owners = [adapter for adapter, n in zip(adapters, lens, strict=True) for _ in range(n)]
    assert slots_of_tokens(manager.lora_backend.batch_info, sum(lens)) == [_SLOTS[owner] for owner in owners]
    with gap.narrowed(batch, runner):
        kept = gap.kept.tolist()
        assert len(batch.input_ids) == len(kept) == 34 + 20 + 7 + 9
        assert slots_of_tokens(manager.lora_backend.batch_info, len(kept)) == [_SLOTS[owners[i]] for i in kept]
    assert batch.lora_ids == adapters


@st.composite
def splices(draw: st.DrawFn) -> PendingSplice:
    prefix_len = draw(st.integers(7, 40))
    end = prefix_len + draw(st.integers(2, 300))
    inner = sorted(draw(st.sets(st.integers(prefix_len, end - 1), max_size=10)))
    runs = zip(inner[::2], inner[1::2], strict=False)
    return splice(prefix_len, end, *((start, stop, 7) for start, stop in runs), slots=1000)


@given(splices(), st.data())
def test_admission_clips_the_plan_and_keeps_its_slots_aligned(pending: PendingSplice, data: st.DataObject) -> None:
    end = data.draw(st.integers(pending.plan.prefix_len + 1, pending.plan.end))
    state = request_state(pending=pending)
    assert state.admit(pending.plan.prefix_len, end, first_chunk=True) is pending.plan
    assert pending.plan.end == end
    assert [rows[:2] for rows in state.spliced] == [(run.target_start, run.target_end) for run in pending.plan.runs]
    spans = [(piece.start, piece.end) for piece in pending.pieces]
    assert spans == [(run.target_start, run.target_end) for run in pending.plan.runs]
    for piece in pending.pieces:
        assert (piece.shift, piece.place) == (7, Place.DEVICE)
        assert piece.slots.tolist() == list(range(1000 + piece.start, 1000 + piece.end))


def test_the_donors_of_a_plan_are_unlocked_once_whatever_becomes_of_it() -> None:
    """Dropped at admission, taken with nothing left to splice, or left behind by a request that goes."""
    for leave in (
        lambda state: state.drop_plan(Fallback.MEMORY),
        lambda state: (state.admit(0, 10, first_chunk=True), state.take_plan()),
        lambda state: state.release_row(),
    ):
        released: list[str] = []
        pending = splice(0, 60, (10, 40, 10))
        pending.locks.callback(released.append, "donor")
        state = request_state(pending=pending)
        leave(state)
        state.release_row()
        assert (released, state.pending, state.take_plan()) == (["donor"], None, None)
