"""Slots of speculative decoding against loops over single tokens."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.platform import slot_ops

_ROWS, _WIDTH = 5, 16


def page_table() -> torch.Tensor:
    """Every entry is another slot."""
    return torch.randperm(_ROWS * _WIDTH, generator=torch.Generator().manual_seed(0)).view(_ROWS, _WIDTH).int()


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """A row, a start and an end for each request of a batch; no two share a row."""
    rows = draw(st.permutations(range(_ROWS)))[: draw(st.integers(1, _ROWS))]
    ends = [(row, draw(st.integers(0, _WIDTH))) for row in rows]
    return [(row, draw(st.integers(0, end)), end) for row, end in ends]


@given(spans())
def test_slots_of_spans_are_read_and_written_one_by_one(batch: list[tuple[int, int, int]]) -> None:
    rows, starts, ends = (torch.tensor(column) for column in zip(*batch, strict=True))
    table = page_table()
    expected = [int(table[row, place]) for row, start, end in batch for place in range(start, end)]
    assert slot_ops.slots_between(rows, table, starts, ends, len(batch), 0, "cpu").tolist() == expected
    written = page_table()
    fresh = torch.arange(1000, 1000 + len(expected) + 3)
    slot_ops.assign_slots(rows, written, starts, ends, fresh, len(batch))
    slots = iter(fresh.tolist())
    for row, start, end in batch:
        for place in range(start, end):
            table[row, place] = next(slots)
    assert torch.equal(written, table)


@given(st.lists(st.tuples(st.integers(0, _ROWS - 1), st.integers(0, 7)), min_size=1, max_size=4), st.integers(1, 3))
def test_a_draft_writes_behind_each_sequence(batch: list[tuple[int, int]], topk: int) -> None:
    rows, seq_lens = (torch.tensor(column) for column in zip(*batch, strict=True))
    table, num_cols = page_table(), 3
    out = torch.zeros(len(batch) * topk * num_cols, dtype=torch.long)
    slot_ops.draft_slots(rows, table, seq_lens, out, topk, num_cols)
    assert out.tolist() == [int(table[r, n + i]) for r, n in batch for i in range(topk * num_cols)]


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_kept_nodes_are_packed_and_their_last_token_goes_on(batch: list[list[bool]]) -> None:
    """Trees of four nodes, of which the root and some others are kept."""
    paths = [[0, *(node + 1 for node, is_kept in enumerate(tree) if is_kept)] for tree in batch]
    size, width = len(paths) * 4, 4
    slots = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[4 * i + node for node in path] + [-1] * (4 - len(path)) for i, path in enumerate(paths)])
    lengths = torch.tensor([len(path) for path in paths])
    packed, front, last = (torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long), lengths.clone())
    slot_ops.accepted_slots(index, slots, packed, size)
    slot_ops.front_slots(lengths, slots, front)
    kept = [int(slots[4 * i + node]) for i, path in enumerate(paths) for node in path]
    assert packed.tolist() == kept + [0] * (size - len(kept))
    leading = [int(slots[4 * i + node]) for i, path in enumerate(paths) for node in range(len(path))]
    assert front.tolist() == leading + [0] * (size - len(leading))
    tokens = torch.arange(100, 100 + size)
    slot_ops.bonus_tokens(tokens, lengths, last, width, len(paths))
    assert last.tolist() == [100 + width * i + len(path) - 1 for i, path in enumerate(paths)]
