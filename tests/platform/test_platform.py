"""The CPU platform: when it takes part, and speculative decoding's trees and slots against slow references."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import pic_platform as platform
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pic_platform import products, slot_ops, torchvision_shim, tree_ops

Patch = pytest.MonkeyPatch


@pytest.fixture
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accelerator, no settings, and no shim left behind by a test."""
    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platform, "_find_accelerator", lambda: None)
    monkeypatch.setattr(torchvision_shim, "is_needed", lambda: False)


@pytest.mark.usefixtures("plain_machine")
@pytest.mark.parametrize(
    ("chosen", "is_ours"),
    [
        ({}, True),
        ({"SGLANG_PLATFORM": "pic_cpu"}, True),
        ({"SGLANG_PLATFORM": "other"}, False),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, False),
        ({"SGLANG_PLATFORM": "pic_cpu", "SGLANG_USE_CPU_ENGINE": "1"}, True),
    ],
)
def test_takes_a_cpu_unless_the_operator_chose(monkeypatch: Patch, chosen: dict[str, str], is_ours: bool) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert platform.activate() == (platform.PLATFORM_CLASS if is_ours else None)


@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_of_a_slow_dtype_are_multiplied_as_float32(has_bias: bool) -> None:
    """And rounded once, as an accelerator does; few rows and other dtypes are left to torch."""
    asked: list[torch.dtype] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        asked.append(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    multiply = products.in_float32(linear, {torch.bfloat16})
    weight, rows = torch.randn(24, 48), torch.randn(2, 40, 48)
    bias = torch.randn(24) if has_bias else None

    def product(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return multiply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    many, few = product(rows, torch.bfloat16), product(rows[0, :3], torch.bfloat16)
    assert asked == [torch.float32, torch.bfloat16]
    assert many.dtype == few.dtype == torch.bfloat16
    exact = torch.nn.functional.linear(
        rows.bfloat16().float(), weight.bfloat16().float(), None if bias is None else bias.bfloat16().float()
    )
    assert torch.equal(many, exact.bfloat16())


@pytest.mark.parametrize(
    ("version", "cuda", "expected"),
    [
        ("0.28.0+cu130", None, True),
        # With a torch that has CUDA, torchvision loads its own operators.
        ("0.28.0+cu130", "13.0", False),
        ("0.28.0+cpu", None, False),
        ("0.28.0", None, False),
        (None, None, False),
    ],
)
def test_shim_reads_the_build_of_torchvision(
    monkeypatch: Patch, tmp_path: Path, version: str | None, cuda: str | None, expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    package = tmp_path / "torchvision" / "__init__.py"
    if version is not None:
        package.parent.mkdir()
        package.write_text("raise RuntimeError('must not be imported')\n")
        package.with_name("version.py").write_text(f"__version__ = '{version}'\n")
    spec = None if version is None else importlib.util.spec_from_file_location("torchvision", package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    assert torchvision_shim.is_needed() is expected


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank gets its own cores and its share of OpenMP threads; what the operator set is kept."""
    torchvision_shim.install()
    pytest.importorskip("sglang")
    from pic_platform import cpu

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 5})
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for bound, threads in (("0,2|1,5", "2"), ("3|4", "7")):
        cpu._share_machine(2)
        assert (os.environ["SGLANG_CPU_OMP_THREADS_BIND"], os.environ["OMP_NUM_THREADS"]) == (bound, threads)
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "3|4")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")


_FULL_MASK, _OWN_MASK = 0, 1
"""SGLang's `TreeMaskMode`."""


class Draft(NamedTuple):
    """What SGLang's draft hands over for one tree, and the tree as paths of candidates from the root."""

    parent_list: list[int]
    candidates: list[int]
    paths: list[tuple[int, ...]]
    """Of each node; the root's is empty."""


def draw_draft(data: st.DataObject, topk: int, num_steps: int, num_nodes: int) -> Draft:
    """A draft that keeps `topk` branches at random in every step, as SGLang numbers them."""
    paths: dict[int, tuple[int, ...]] = {}
    parent_list, alive = [-1], [()]
    first = 0
    for step in range(num_steps):
        grown = {first + i * topk + k: path for i, path in enumerate(alive) for k in range(topk)}
        paths |= {candidate: (*path, candidate) for candidate, path in grown.items()}
        kept = sorted(grown) if step == 0 else data.draw(st.permutations(sorted(grown)))[:topk]
        if step < num_steps - 1:
            parent_list += kept
        alive = [paths[candidate] for candidate in kept]
        first += len(grown)
    chosen: set[int] = set()
    while len(chosen) < num_nodes - 1:
        open_ = [c for c, path in paths.items() if c not in chosen and set(path[:-1]) <= chosen]
        chosen.add(data.draw(st.sampled_from(open_)))
    candidates = sorted(chosen)
    return Draft(parent_list, candidates, [(), *(paths[candidate] for candidate in candidates)])


def draw_drafts(data: st.DataObject, topk: int, num_steps: int) -> list[Draft]:
    """A batch, whose drafts have as many nodes each."""
    num_nodes = data.draw(st.integers(2, min(9, topk + (num_steps - 1) * topk * topk + 1)))
    return [draw_draft(data, topk, num_steps, num_nodes) for _ in range(data.draw(st.integers(1, 3)))]


class Tree(NamedTuple):
    """What `build_tree` writes."""

    mask: torch.Tensor
    positions: torch.Tensor
    index: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor


def build(drafts: list[Draft], seq_lens: list[int], topk: int, num_steps: int, mode: int) -> Tree:
    """The operator over a batch, with buffers as SGLang makes them."""
    num_nodes, batch = len(drafts[0].paths), len(drafts)
    width = sum(seq_lens) if mode == _FULL_MASK else 0
    index, next_token, next_sibling = torch.full((3, batch, num_nodes), -1)
    tree = Tree(
        torch.ones(num_nodes * (width + num_nodes * batch), dtype=torch.bool),
        torch.empty(batch * num_nodes, dtype=torch.long),
        *(index, next_token, next_sibling),
    )
    given = ([draft.parent_list for draft in drafts], [draft.candidates for draft in drafts], seq_lens)
    tree_ops.build_tree(*map(torch.tensor, given), *tree, topk, num_steps, num_nodes, mode)
    return tree


def children(paths: list[tuple[int, ...]], node: int) -> list[int]:
    """Nodes one step further than a node."""
    return [other for other, path in enumerate(paths) if path and path[:-1] == paths[node]]


@given(data=st.data(), topk=st.integers(1, 4), num_steps=st.integers(1, 4), mode=st.sampled_from([0, 1]))
def test_trees_are_linked_as_their_paths_say(data: st.DataObject, topk: int, num_steps: int, mode: int) -> None:
    drafts = draw_drafts(data, topk, num_steps)
    num_nodes, seq_lens = len(drafts[0].paths), [data.draw(st.integers(1, 5)) for _ in drafts]
    tree = build(drafts, seq_lens, topk, num_steps, mode)
    start = 0
    for number, (draft, seq_len) in enumerate(zip(drafts, seq_lens, strict=True)):
        prefix_len = seq_len if mode == _FULL_MASK else 0
        end = start + num_nodes * (prefix_len + num_nodes)
        rows = tree.mask[start:end].view(num_nodes, -1).tolist()
        start = end
        for node, path in enumerate(draft.paths):
            seen = [set(other) <= set(path) for other in draft.paths]
            assert rows[node] == [True] * prefix_len + seen
            assert tree.positions[number * num_nodes + node] == seq_len + len(path)
            assert tree.index[number, node] == number * num_nodes + node
            own = children(draft.paths, node)
            linked = [int(tree.next_token[number, node])]
            while linked[-1] != -1:
                linked.append(int(tree.next_sibling[number, linked[-1]]))
            assert linked == [*own, -1]
    assert start == tree.mask.numel()


@given(data=st.data(), topk=st.integers(1, 3), num_steps=st.integers(1, 3))
def test_a_tree_is_found_again_in_its_mask(data: st.DataObject, topk: int, num_steps: int) -> None:
    """NGRAM hands over masks alone."""
    drafts = draw_drafts(data, topk, num_steps)
    seq_lens = [data.draw(st.integers(1, 5)) for _ in drafts]
    built = build(drafts, seq_lens, topk, num_steps, _OWN_MASK)
    shape = built.index.shape
    found = Tree(built.mask, torch.zeros(shape.numel(), dtype=torch.long), *torch.zeros(3, *shape).long())
    tree_ops.reconstruct_tree(built.mask, torch.tensor(seq_lens), *found[1:], *shape)
    for part, expected in zip(found, built, strict=True):
        assert torch.equal(part, expected)


def draw_batch(data: st.DataObject, vocab_size: int) -> tuple[list[Draft], Tree, torch.Tensor]:
    """Drafts, their trees, and the tokens of their nodes: those of one parent differ."""
    topk, num_steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    drafts = draw_drafts(data, topk, num_steps)
    tokens = torch.zeros(len(drafts), len(drafts[0].paths), dtype=torch.long)
    for number, draft in enumerate(drafts):
        for node in range(len(draft.paths)):
            own = children(draft.paths, node)
            for child, token in zip(own, data.draw(st.permutations(range(vocab_size))), strict=False):
                tokens[number, child] = token
    return drafts, build(drafts, [1] * len(drafts), topk, num_steps, _OWN_MASK), tokens


def outputs(tokens: torch.Tensor, drafts: list[Draft]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`predicts`, `accept_index` and `accept_token_num` as SGLang makes them."""
    longest = 1 + max(len(path) for draft in drafts for path in draft.paths)
    return (
        torch.zeros(tokens.numel(), dtype=torch.int32),
        torch.full((len(drafts), longest), -1, dtype=torch.int32),
        torch.empty(len(drafts), dtype=torch.int32),
    )


@given(data=st.data())
def test_greedy_verification_keeps_the_path_that_the_target_takes(data: st.DataObject) -> None:
    drafts, tree, tokens = draw_batch(data, vocab_size=4)
    target = torch.tensor([data.draw(st.integers(0, 3)) for _ in range(tokens.numel())]).view_as(tokens)
    predicts, kept, num_kept = outputs(tokens, drafts)
    tree_ops.verify_tree_greedy(predicts, kept, num_kept, tokens, *tree[2:], target)
    num_nodes = tokens.shape[1]
    for number, draft in enumerate(drafts):
        path = [0]
        while right := [c for c in children(draft.paths, path[-1]) if tokens[number, c] == target[number, path[-1]]]:
            path.append(right[0])
        first = number * num_nodes
        assert kept[number].tolist() == [first + node for node in path] + [-1] * (kept.shape[1] - len(path))
        assert num_kept[number] == len(path) - 1
        assert [int(predicts[first + node]) for node in path] == [int(target[number, node]) for node in path]


TWO_CHILDREN = Draft([-1], [0, 1], [(), (0,), (1,)])


def test_sampled_answers_are_distributed_as_without_speculation() -> None:
    """Over all draws from a grid, the first token has the target's distribution, whatever the draft guessed."""
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    # The root's children have the tokens 1 and 3.
    tree, tokens = build([TWO_CHILDREN], [1], 2, 1, _OWN_MASK), torch.tensor([[0, 1, 3]])
    counts = torch.zeros(4)
    grid = (torch.arange(40) + 0.5) / 40
    for draw in grid:
        for last in grid:
            predicts, kept, num_kept = outputs(tokens, [TWO_CHILDREN])
            coins = torch.tensor([[draw, 0.5, 0.5]])
            tree_ops.verify_tree_sampling(
                *(predicts, kept, num_kept, tokens, *tree[2:], coins, last[None], probs[None], torch.zeros(1, 3, 4))
            )
            assert int(num_kept) == int(predicts[0] in (1, 3))
            counts[predicts[0]] += 1
    assert torch.allclose(counts / counts.sum(), probs[0], atol=0.01)


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
