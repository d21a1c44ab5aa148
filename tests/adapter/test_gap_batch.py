"""The layout of a gap prefill: virtual sequences, kept tokens, slots of the splice."""

from __future__ import annotations

import torch

from sglang_pic.adapter.gap_batch import build_gap_batch
from sglang_pic.adapter.request_state import PendingSplice, RunSource


def test_mixed_batch_layout() -> None:
    """Two requests with runs around one without; every list checked by hand."""
    first = PendingSplice(4, 20, [RunSource(6, 12, shift=-3, slots=torch.arange(900, 906))], locks=["a"])
    last = PendingSplice(
        0, 9, [RunSource(1, 3, 5, torch.tensor([70, 71])), RunSource(3, 7, 8, torch.arange(50, 54))], locks=["b", "c"]
    )
    rows = [torch.arange(100, 164), torch.arange(200, 264), torch.arange(300, 364)]
    gap = build_gap_batch([first, None, last], [4, 10, 0], [16, 5, 9], [16, 2, 9], rows, torch.device("cpu"))

    assert gap.owners == [0, 0, 1, 2, 2]
    assert gap.prefix_lens == [4, 12, 10, 0, 7]
    assert gap.seq_lens == [6, 20, 15, 1, 9]
    assert gap.kept.tolist() == [0, 1, *range(8, 16), *range(16, 21), 21, 28, 29]
    assert gap.computed_lens == [10, 5, 3]
    assert gap.start_lens == [10, 2, 3], "spliced requests want no input logprobs; the others keep their start"
    assert gap.splice.src.tolist() == [*range(900, 906), 70, 71, *range(50, 54)]
    assert gap.splice.dst.tolist() == [*range(106, 112), 301, 302, 303, 304, 305, 306]
    assert gap.splice.shifts.tolist() == [-3] * 6 + [5] * 2 + [8] * 4
    assert gap.locks == ["a", "b", "c"]
