"""Pinned paths: their donors stay in the index when other prompts compute the same text."""

from __future__ import annotations

from core_builders import join, plan_of, publish, text

from sglang_pic.core import MOST_REUSE, ContentIndex, Path
from sglang_pic.core.invariants import check


def test_donors_of_a_pinned_path_are_the_last_to_leave() -> None:
    index = ContentIndex(MOST_REUSE)
    block = text(1, 200)
    pinned = join(text(2, 60), block)
    publish(index, pinned)
    index.pin("a", pinned)
    for seed in range(3, 12):
        publish(index, text(seed, 70), block)
        check(index)

    def is_served() -> bool:
        """Whether the pinned path is a donor where no other one is resident."""
        prompt = join(text(99, 90), block, text(98, 9))

        def resolve(path: Path, end: int) -> int:
            return end if path.tokens(60).tolist() == pinned[:60].tolist() else 0

        return bool(plan_of(index, prompt, resolve=resolve).runs)

    assert is_served()
    index.unpin("a", pinned)
    for seed in range(20, 32):
        publish(index, text(seed, 70), block)
    assert not is_served()
    assert all(not node.num_pins for node in index._ages.values())
