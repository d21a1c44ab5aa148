"""The operators of speculative decoding that SGLang has for accelerators only, in plain PyTorch.

A draft proposes a tree of tokens behind the last token of a sequence, its root; the target computes all of them in one
pass and keeps one path. Signatures, names and layouts are SGLang's (`kernels/ops/speculative`), which calls these in
the place of its kernels. Trees have a few dozen nodes, so they are walked as lists on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_PREFIX_MASK = 0
"""SGLang's `TreeMaskMode.FULL_MASK`: a row of the mask begins with the tokens before the tree."""


def build_tree(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Link the nodes of every tree, and tell which of them each node sees.

    A candidate of the draft has a number: `topk` of them at each of the first step, `topk * topk` at every later one.
    Candidates `[group * topk, (group + 1) * topk)` have one parent: the root for group 0, else the candidate
    `parent_list[group]`.

    Args:
        parent_list: `[num_trees, num_groups]`.
        top_scores_index: Candidates that became nodes 1 and on, ascending, `[num_trees, num_verify_tokens - 1]`.
        seq_lens: Tokens before each root, `[num_trees]`.
        tree_mask: bool, flat, written in place but for the tokens before the tree: per tree and node a row of
            `seq_len + num_verify_tokens` entries, or of `num_verify_tokens` in the other mode.
        positions: `[num_trees * num_verify_tokens]`, written in place.
        retrieve_index: Number of each node in the batch, `[num_trees, num_verify_tokens]`, written in place.
        retrieve_next_token: First child of each node, -1 where it has none; filled with -1 by the caller.
        retrieve_next_sibling: Next child of the same parent, -1 where there is none; filled with -1 by the caller.
        topk: Branches of each step.
        spec_steps: Steps of the draft, the greatest depth of a node.
        num_verify_tokens: Nodes of each tree, the root included.
        tree_mask_mode: SGLang's `TreeMaskMode`.
    """
    num_nodes = num_verify_tokens
    start = 0
    numbers = zip(parent_list.tolist(), top_scores_index.tolist(), seq_lens.tolist(), strict=True)
    for tree, (group_parents, candidates, seq_len) in enumerate(numbers):
        parents = _parents(group_parents, candidates, topk)
        visible = torch.eye(num_nodes, dtype=torch.bool)
        depths = [0] * num_nodes
        for node, parent in enumerate(parents[1:], start=1):
            visible[node] |= visible[max(parent, 0)]
            depths[node] = depths[max(parent, 0)] + 1
        assert max(depths) <= spec_steps, "a node lies deeper than the draft went"
        prefix_len = seq_len if int(tree_mask_mode) == _PREFIX_MASK else 0
        end = start + num_nodes * (prefix_len + num_nodes)
        tree_mask[start:end].view(num_nodes, -1)[:, prefix_len:] = visible
        start = end
        first = tree * num_nodes
        positions[first : first + num_nodes] = torch.tensor(depths) + seq_len
        retrieve_index[tree] = torch.arange(first, first + num_nodes)
        _link(parents, retrieve_next_token[tree], retrieve_next_sibling[tree])


def _parents(group_parents: list[int], candidates: list[int], topk: int) -> list[int]:
    """The parent of each node; -1 for the root.

    NOTE: the draft chooses nodes by their probability along the path. A node whose own token is certain ties with its
    parent, and may be chosen without it: -1 as well, so that no path reaches it.
    """
    node_of = {candidate: index + 1 for index, candidate in enumerate(candidates)}
    groups = [candidate // topk for candidate in candidates]
    return [-1, *(0 if group == 0 else node_of.get(group_parents[group], -1) for group in groups)]


def _link(parents: list[int], next_token: torch.Tensor, next_sibling: torch.Tensor) -> None:
    first_child: dict[int, int] = {}
    # From the last node on, so that children are in their own order.
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent >= 0:
            next_sibling[node] = first_child.get(parent, -1)
            next_token[parent] = first_child[parent] = node


def reconstruct_tree(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Link the nodes of trees that are given by the ancestors of each node (NGRAM).

    Args:
        tree_mask: bool, `[batch_size * draft_token_num * draft_token_num]`.
        verified_seq_len: Tokens before each root, `[batch_size]`.
        positions: `[batch_size * draft_token_num]`, written in place.
        retrieve_index: `[batch_size, draft_token_num]`, as of `build_tree`, written in place.
        retrieve_next_token: As of `build_tree`, written in place.
        retrieve_next_sibling: As of `build_tree`, written in place.
        batch_size: Trees.
        draft_token_num: Nodes of each tree.
    """
    masks = tree_mask.view(batch_size, draft_token_num, draft_token_num)
    depths = masks.tril(-1).sum(-1)
    positions.view(batch_size, draft_token_num).copy_(depths + verified_seq_len[:, None])
    retrieve_index.copy_(torch.arange(batch_size * draft_token_num).view(batch_size, draft_token_num))
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for tree, mask in enumerate(masks.tolist()):
        parents = [max((other for other in range(node) if mask[node][other]), default=-1) for node in range(len(mask))]
        _link(parents, retrieve_next_token[tree], retrieve_next_sibling[tree])


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow each tree from its root while a child is the target's token.

    Args:
        predicts: `[num_nodes of all trees]`: at each kept node the token behind it, written in place.
        accept_index: The kept path as numbers of nodes in the batch, `[num_trees, max_depth + 1]`, filled
            with -1 by the caller, written in place.
        accept_token_num: Kept nodes without the root, `[num_trees]`, written in place.
        candidates: The token of each node, `[num_trees, num_nodes]`.
        retrieve_index: As of `build_tree`.
        retrieve_next_token: As of `build_tree`.
        retrieve_next_sibling: As of `build_tree`.
        target_predict: The target's token behind each node, `[num_trees, num_nodes]`.
        topk: Not used; trees of any shape are walked.

    Returns:
        `predicts`, `accept_index`, `accept_token_num`.
    """
    del retrieve_index, topk
    wanted = target_predict.tolist()

    def choose(tree: int, node: int, children: dict[int, int]) -> tuple[int, int | None]:
        token = int(wanted[tree][node])
        return token, children.get(token)

    _walk(predicts, accept_index, accept_token_num, candidates, (retrieve_next_token, retrieve_next_sibling), choose)
    return predicts, accept_index, accept_token_num


def verify_tree_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Follow each tree from its root as if every token were drawn from the target's distribution.

    A node's one draw goes to its children in turn, each with the probability of its token. Where it goes to none, the
    token is drawn from the other tokens. With thresholds of 1 the answer is distributed as without speculation.

    Args:
        predicts: As of `verify_tree_greedy`, like the next six.
        accept_index: See there.
        accept_token_num: See there.
        candidates: See there; no two children of a node have the same token.
        retrive_index: See there.
        retrive_next_token: See there.
        retrive_next_sibling: See there.
        uniform_samples: A draw from `[0, 1)` for each node, `[num_trees, num_nodes]`.
        uniform_samples_for_final_sampling: A draw from `[0, 1)` for each tree's last token, `[num_trees]`.
        target_probs: The target's distribution behind each node, `[num_trees, num_nodes, vocab_size]`.
        draft_probs: Not used; the draft's tokens are taken as given.
        threshold_single: A child whose token has this probability or more is kept with any draw.
        threshold_acc: The probability of the children so far is divided by this.
        deterministic: Not used; the result depends on the draws alone.
    """
    del retrive_index, draft_probs, deterministic
    draws, last_draws = uniform_samples.tolist(), uniform_samples_for_final_sampling.tolist()

    def choose(tree: int, node: int, children: dict[int, int]) -> tuple[int, int | None]:
        probs = target_probs[tree, node]
        reached = 0.0
        for token, child in children.items():
            share = float(probs[token])
            reached += share
            if draws[tree][node] < reached / threshold_acc or share >= threshold_single:
                return token, child
        others = probs.clone()
        others[list(children)] = 0.0
        cumulative = others.double().cumsum(0)
        drawn = torch.searchsorted(cumulative, last_draws[tree] * cumulative[-1:], right=True)
        return min(int(drawn), int(others.nonzero().max()) if bool(others.any()) else int(probs.argmax())), None

    _walk(predicts, accept_index, accept_token_num, candidates, (retrive_next_token, retrive_next_sibling), choose)


def _walk(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    links: tuple[torch.Tensor, torch.Tensor],
    choose: Callable[[int, int, dict[int, int]], tuple[int, int | None]],
) -> None:
    """Keep a path of each tree.

    `choose` takes a tree, a node and its children by their tokens, and returns the token behind the node and the child
    that the path goes on with, None where it ends.
    """
    next_tokens, next_siblings = (link.tolist() for link in links)
    num_nodes, longest = candidates.shape[1], accept_index.shape[1]
    for tree, tokens in enumerate(candidates.tolist()):
        path: list[int] = []
        node: int | None = 0
        while node is not None:
            path.append(tree * num_nodes + node)
            children: dict[int, int] = {}
            child = next_tokens[tree][node] if len(path) < longest else -1
            while child != -1:
                children.setdefault(tokens[child], child)
                child = next_siblings[tree][child]
            predicts[path[-1]], node = choose(tree, node, children)
        accept_index[tree, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[tree] = len(path) - 1


def renorm_top_k(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Distributions without all but their `top_ks` likeliest tokens; tokens as likely as the last of these stay.

    Args:
        probs: `[num_rows, vocab_size]`.
        top_ks: 1 or more, `[num_rows]`; above `vocab_size` all tokens stay.

    Returns:
        As `probs`.
    """
    ordered = probs.sort(dim=-1, descending=True).values
    least = ordered.gather(-1, (top_ks.long().clamp(max=probs.shape[-1]) - 1)[:, None])
    return _renormalise(probs.masked_fill(probs < least, 0.0))


def renorm_top_p(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Distributions without all but the fewest likeliest tokens that have `top_ps` together.

    Args:
        probs: `[num_rows, vocab_size]`.
        top_ps: In `(0, 1]`, `[num_rows]`.

    Returns:
        As `probs`.
    """
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(before >= top_ps[:, None], 0.0)
    return _renormalise(torch.zeros_like(probs).scatter_(-1, order, kept))


def _renormalise(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(-1, keepdim=True)
