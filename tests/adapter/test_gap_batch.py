"""The layout of a gap prefill: virtual sequences, kept tokens, slots of the splice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_pic.adapter.serve.gap_batch import _read_here, build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from tests.adapter.builders import TRANSLATOR, extend_batch, plan, splice


def test_mixed_batch_layout() -> None:
    """Two requests with runs around one without; every list checked by hand."""
    released: list[str] = []
    first = splice(4, 20, (6, 12, -3), slots=894)
    last = PendingSplice(plan(0, 9, (1, 3, 5), (3, 7, 8)), [torch.tensor([70, 71]), torch.arange(50, 54)])
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
    assert gap.splice.src.tolist() == [*range(900, 906), 70, 71, *range(50, 54)]
    assert gap.splice.dst.tolist() == [*range(106, 112), 301, 302, 303, 304, 305, 306]
    assert gap.splice.shifts.tolist() == [-3] * 6 + [5] * 2 + [8] * 4
    gap.locks.close()
    gap.locks.close()
    assert sorted(released) == ["a", "b", "c"], "each donor is unlocked once"


def test_window_slots_are_those_of_the_plan() -> None:
    """Read while the donors were locked; of a run that a chunk cuts short the first ones."""
    first, last = splice(4, 20, (6, 12, -3)), splice(0, 9, (1, 3, 5), (3, 7, 8))
    first.window_slots, last.window_slots = [torch.arange(30, 36)], [torch.tensor([50, 51]), torch.arange(60, 64)]
    last.plan = last.plan.clip(6)
    rows = [torch.arange(100, 164), torch.arange(200, 264), torch.arange(300, 364)]
    gap = build_gap_batch([first, None, last], [4, 10, 0], [16, 5, 6], [16, 5, 6], rows, torch.device("cpu"))
    assert gap.splice.windows is not None
    assert gap.splice.windows.tolist() == [*range(30, 36), 50, 51, 60, 61]
    assert len(gap.splice.src) == len(gap.splice.windows)


def test_slots_stay_until_the_pass_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device they lie in memory of the scheduler's stream, and the batch is laid out on the stream of the pass."""
    used: list[tuple[torch.Tensor, object]] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *used_by: used.append(used_by))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "of the pass")
    _read_here(slots := torch.arange(3))
    assert used == [(slots, "of the pass")]


def test_a_batch_without_runs_is_laid_out_as_it_is() -> None:
    gap = build_gap_batch([None, None], [4, 0], [3, 2], [3, 2], [], torch.device("cpu"))
    assert (gap.prefix_lens, gap.seq_lens, gap.kept.tolist()) == ([4, 0], [7, 2], [0, 1, 2, 3, 4])
    assert all(each.numel() == 0 for each in (gap.splice.src, gap.splice.dst, gap.splice.shifts))


def test_adapters_and_media_go_with_the_tokens_that_are_computed() -> None:
    """A request with an adapter beside a spliced one: SGLang prepared adapters for the batch as it was before."""
    spliced = splice(0, 20, (6, 12, -3))
    rows = [torch.arange(100, 164), torch.arange(200, 264)]
    gap = build_gap_batch([spliced, None], [0, 10], [20, 5], [20, 5], rows, torch.device("cpu"))
    prepared: list[tuple[object, ...]] = []

    def prepare(batch: SimpleNamespace) -> None:
        lens = batch.extend_seq_lens_cpu
        assert batch.extend_seq_lens.tolist() == lens
        prepared.append((batch.batch_size, lens, batch.extend_logprob_start_lens_cpu, batch.lora_ids))

    adapters = SimpleNamespace(prepare_lora_batch=prepare)
    runner = SimpleNamespace(lora_manager=adapters, kv_index_translator=TRANSLATOR, prefill_aware_swa=False)
    # Of the second request's media its own sequence must know, and its tokens what kind they are.
    media = {"mm_inputs": [None, "image"], "mm_token_modalities": torch.tensor([0] * 20 + [1] * 5)}
    slots = torch.cat([rows[0][:20], rows[1][10:15]])
    batch = extend_batch(
        [20, 5], prefix_lens=[0, 10], rows=[1, 2], out_cache_loc=slots, lora_ids=[None, "adapter"], **media
    )
    with gap.narrowed(batch, runner):
        assert batch.lora_ids == [None, None, "adapter"]
        assert batch.mm_inputs == [None, None, "image"]
        assert batch.mm_token_modalities.tolist() == [0] * 14 + [1] * 5
        assert batch.extend_seq_lens.tolist() == [6, 8, 5]
    assert prepared == [(2, [14, 5], [14, 5], [None, "adapter"])]
    assert (batch.batch_size, batch.lora_ids) == (2, [None, "adapter"])
