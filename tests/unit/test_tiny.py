"""The whole story of the core in one test: a prompt is served from text that stood elsewhere."""

from __future__ import annotations

from core_builders import join, plan_of, text

from sglang_pic.core import MOST_REUSE, ContentIndex, Tokens, as_tokens
from sglang_pic.core.invariants import check

OPEN, CLOSE = as_tokens([1]), as_tokens([2])
DELIMITERS = frozenset({1, 2})


def prompt(*messages: Tokens) -> Tokens:
    return join(*(part for message in messages for part in (OPEN, message, CLOSE)))


def test_a_changed_header_costs_only_itself() -> None:
    """header + document + question: served by prefix only if the header is the same, by content whatever it is."""
    document = text(0, 900)
    first = prompt(text(1, 60), document, text(2, 40))
    second = prompt(text(3, 73), document, text(4, 25))
    index = ContentIndex(MOST_REUSE)
    index.publish("tenant", first, [(0, len(first))], delimiters=DELIMITERS)

    plan = plan_of(index, second, prefix_len=1, namespace="tenant")

    (run,) = plan.runs
    assert run.shift == 73 - 60
    # [74, 978) is equal: the delimiters on both sides of the document, [76, 976), are. Its first token is the seam.
    assert (run.target_start, run.target_end) == (75, 978)
    assert second[run.target_start : run.target_end].tolist() == first[run.donor_start : run.donor_end].tolist()
    assert plan.gaps == ((1, 75), (978, len(second)))

    # What was spliced is no donor: a third prompt is served by the first one's rows again.
    spliced = [(run.target_start, run.target_end)]
    index.publish("tenant", second, [(1, len(second))], spliced=spliced, delimiters=DELIMITERS)
    third = prompt(text(5, 99), document, text(6, 10))
    again = plan_of(index, third, prefix_len=1, namespace="tenant")
    assert [run.donor.tokens(run.donor_end).tolist() for run in again.runs] == [first[: run.donor_end].tolist()]

    # Another tenant sees nothing of it, and when the rows have left the tree nobody does.
    assert not plan_of(index, third, prefix_len=1, namespace="other").runs
    gone = plan_of(index, third, prefix_len=1, resolve=lambda path, end: 0, namespace="tenant")
    assert not gone.runs
    check(index)
