"""Compares the platform's operators of speculative decoding with SGLang's Triton kernels, in Triton's interpreter.

To be run with `TRITON_INTERPRET=1`. Drafts are numbered by SGLang's own functions. Exits with 0 where all cases are
equal. NGRAM's operator is left out: its kernel cannot be imported without `sgl_kernel`.
"""

from __future__ import annotations

import torch
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool
from sglang.srt.speculative import eagle_utils, spec_utils

from sglang_pic.platform import slot_ops, tree_ops

_CASES = 20
_VOCAB_SIZE = 5


def draft(
    generator: torch.Generator, batch: int, topk: int, num_steps: int, num_nodes: int
) -> tuple[torch.Tensor, ...]:
    """A random draft as SGLang hands it over: parents, candidates and tokens."""
    later = spec_utils._select_top_k_tokens_later._torchdynamo_orig_callable
    probs = torch.rand(batch, topk, generator=generator)
    tokens = torch.randint(_VOCAB_SIZE, (batch, topk), generator=generator)
    lists: tuple[list[torch.Tensor], ...] = ([], [], [])
    scores = None
    for step in range(num_steps):
        select = spec_utils._select_top_k_tokens_first if step == 0 else None
        args = (probs, tokens, None)
        _, _, scores, info = select(*args, topk) if select else later(step, *args, scores, topk)
        for each, part in zip(lists, info, strict=True):
            each.append(part)
        probs = torch.rand(batch * topk, topk, generator=generator)
        tokens = torch.randint(_VOCAB_SIZE, (batch * topk, topk), generator=generator)
    return eagle_utils.organize_draft_results(*lists, num_nodes)


def same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    """Stops the process at the first difference."""
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (one, other)


def compare_trees(seed: int) -> None:
    """Both mask modes, then greedy verification of the tree."""
    generator = torch.Generator().manual_seed(seed)
    topk, num_steps, batch = 1 + seed % 3, 1 + seed // 3 % 3, 1 + seed % 4
    num_nodes = min(2 + seed % 6, 1 + topk + (num_steps - 1) * topk * topk)
    parents, candidates, tokens = draft(generator, batch, topk, num_steps, num_nodes)
    seq_lens = torch.randint(1, 9, (batch,), generator=generator)
    for mode in (spec_tree.TreeMaskMode.FULL_MASK, spec_tree.TreeMaskMode.QLEN_ONLY):
        width = int(seq_lens.sum()) if mode == spec_tree.TreeMaskMode.FULL_MASK else 0
        built = []
        for build in (tree_ops.build_tree, spec_tree.sgl_build_tree_kernel_triton):
            out = (
                torch.ones(num_nodes * (width + num_nodes * batch), dtype=torch.bool),
                torch.zeros(batch * num_nodes, dtype=torch.long),
                *torch.full((3, batch, num_nodes), -1),
            )
            build(parents, candidates, seq_lens, *out, topk, num_steps, num_nodes, mode)
            built.append(out)
        same(*built)
    links = built[0][2:]
    nodes = torch.cat((torch.zeros(batch, 1, dtype=torch.long), tokens), dim=1)
    target = torch.randint(_VOCAB_SIZE, (batch, num_nodes), generator=generator)
    verified = []
    for verify in (tree_ops.verify_tree_greedy, spec_tree.verify_tree_greedy_triton):
        out = (
            torch.zeros(batch * num_nodes, dtype=torch.int32),
            torch.full((batch, num_steps + 1), -1, dtype=torch.int32),
            torch.zeros(batch, dtype=torch.int32),
        )
        verify(*out, nodes, *links, target)
        verified.append(out)
    same(*verified)


def compare_slots(seed: int) -> None:
    """What is read from and written to the page table, and what is packed."""
    generator = torch.Generator().manual_seed(seed)
    batch, width, num_nodes = 1 + seed % 4, 40, 5
    table = torch.randperm(6 * width, generator=generator).view(6, width).int()
    rows = torch.randperm(6, generator=generator)[:batch]
    starts = torch.randint(1, 20, (batch,), generator=generator)
    ends = starts + torch.randint(0, 12, (batch,), generator=generator)
    total = int((ends - starts).sum())
    ours = slot_ops.slots_between(rows, table, starts, ends, batch, 0, "cpu")
    theirs, power = torch.zeros(total, dtype=torch.long), 1 << (batch - 1).bit_length()
    cache_locs.assign_extend_cache_locs[(batch,)](rows, table, starts, ends, theirs, width, power)
    same((ours,), (theirs,))
    tables = (table.clone(), table.clone())
    fresh = torch.arange(1000, 1000 + total)
    slot_ops.assign_slots(rows, tables[0], starts, ends, fresh, batch)
    assign_req_to_token_pool[(batch,)](rows, tables[1], starts, ends, fresh, width, power)
    same((tables[0],), (tables[1],))
    drafted = (torch.zeros(batch * 6, dtype=torch.long), torch.zeros(batch * 6, dtype=torch.long))
    slot_ops.draft_slots(rows, table, starts, drafted[0], 2, 3)
    cache_locs.assign_draft_cache_locs_contiguous_func(rows, table, starts, drafted[1], 2, 3)
    same((drafted[0],), (drafted[1],))
    lengths = torch.randint(1, num_nodes, (batch,), generator=generator)
    kept = torch.arange(batch * num_nodes).view(batch, num_nodes)
    kept = kept.masked_fill(torch.arange(num_nodes)[None, :] >= lengths[:, None], -1)
    slots = torch.randperm(batch * num_nodes, generator=generator)
    packed = torch.zeros(4, batch * num_nodes, dtype=torch.long)
    slot_ops.accepted_slots(kept, slots, packed[0], kept.numel())
    eagle.fill_accept_out_cache_loc_func(kept, slots, packed[1], kept.numel())
    slot_ops.front_slots(lengths, slots, packed[2])
    cache_locs.fill_front_out_cache_loc_func(lengths, slots, packed[3])
    same((packed[0], packed[2]), (packed[1], packed[3]))
    last = torch.zeros(2, batch, dtype=torch.long)
    slot_ops.bonus_tokens(slots, lengths, last[0], num_nodes, batch)
    eagle.fill_bonus_tokens_func(slots, lengths, last[1], num_nodes, batch)
    same((last[0],), (last[1],))


if __name__ == "__main__":
    for number in range(_CASES):
        compare_trees(number)
        compare_slots(number)
    print(f"{_CASES} cases equal")
