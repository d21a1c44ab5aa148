"""Adding outcomes up: what is counted, the upper bound against a set of all windows, old values of changed fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.census.changes import changed_fields
from sglang_pic.census.outcome import ChangedField, Outcome
from sglang_pic.census.simulate import simulate
from sglang_pic.census.tally import ChangedFields, Counts, Detail, Tally, UpperBound
from sglang_pic.census.windows import WINDOW_LEN, Repeated, WindowSearch
from sglang_pic.core import Context, Path, Plan, Run, as_tokens
from tests.helpers.census_fakes import CONFIG, Ids, IdsEncoder, session

A, B, C = list(range(100, 300)), list(range(300, 400)), list(range(400, 500))


def outcomes() -> list[Outcome]:
    """A text computed once, then found again at another place: by its own session, and across two messages."""
    sessions = [
        session("one", [([A], [5]), ([B, A], [6])], role="tool"),
        session("two", [([C, A[:100], A[100:]], [7])]),
    ]
    return list(simulate([("f", sessions)], IdsEncoder(), config=CONFIG))


def count(outcomes: Iterable[Outcome]) -> Tally:
    """All of them, with what a search finds in each."""
    tally, search = Tally(), WindowSearch()
    for outcome in outcomes:
        path, prompt_len = outcome.encoded.path, len(outcome.encoded.tokens)
        tally.add(outcome, search.observe(path, prompt_len=prompt_len, prefix_len=outcome.stored_len))
    return tally


def counts(tally: Tally) -> Counts:
    return tally.counts(IdsEncoder())


def test_everything_is_counted_once() -> None:
    tally = count(outcomes())
    found = counts(tally)
    assert (found.sessions, found.calls, found.prompt_tokens) == (2, 3, 800)
    assert found.prefix_tokens == 0
    # The second and the third prompt hold A: less its sink, a seam, and the last token of the prompt.
    assert (found.runs, found.chunk_tokens, found.new_tokens) == (2, 2 * 194, 800 - 2 * 194)
    assert found.recovered == 2 * 194 / 800
    assert found.detail == Detail(
        is_complete=False,
        tokenizer="ids",
        tokenizer_exact=True,
        chunk_tokens_same_session=194,
        chunk_tokens_other_session=194,
        changed_fields=ChangedFields(calls=0, fields=0, chunk_tokens=0, guarded_tokens=0),
        inherited_calls=0,
        upper_bound=UpperBound(window_len=WINDOW_LEN, tokens=400, tokens_behind=400),
    )


def test_a_session_whose_first_call_is_refused_is_a_session() -> None:
    """A template may refuse any call."""
    assert counts(count(one for one in outcomes() if one.ref != outcomes()[0].ref)).sessions == 2


def test_a_prompt_that_was_seen_whole_has_nothing_to_find() -> None:
    """Its last token is computed in any case; no search could have spared it."""
    tally = count(simulate([("f", [session("s", [([A], [5]), ([A], [5])])])], IdsEncoder(), config=CONFIG))
    found = counts(tally)
    assert (found.prefix_tokens, found.chunk_tokens, found.new_tokens) == (199, 0, 201)
    assert tally.repeated == {"tokens": 0, "tokens_behind": 0}


def test_what_stands_behind_a_changed_field() -> None:
    first, second, third = outcomes()
    run = second.runs[0]
    value = first.encoded.tokens[:2]
    second = replace(
        second,
        runs=(run._replace(end=run.start + 50, context=Context.CHANGED), run._replace(start=run.start + 70)),
        changed_fields=(ChangedField(10, 12, value), ChangedField(20, 20, value)),
        guarded=((run.start + 50, run.start + 70),),
    )
    found = counts(count([first, second, third]))
    assert found.detail.changed_fields == ChangedFields(calls=1, fields=2, chunk_tokens=50, guarded_tokens=20)
    assert found.chunk_tokens == 2 * 194 - 20


SHORT = 4

# Pieces of a few texts one after the other, so that windows repeat at every alignment and across borders.
CALLS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=14), st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=15
)


def brute(seen: set[tuple[int, ...]], path: Ids, prompt_len: int, prefix_len: int, size: int) -> Repeated:
    starts = [at for at in range(prompt_len - size + 1) if tuple(path[at : at + size]) in seen]
    seen |= {tuple(path[at : at + size]) for at in range(len(path) - size + 1)}
    tokens, behind = (
        {at for start in some for at in range(start, start + size) if at >= prefix_len}
        for some in (starts, [start for start in starts if start >= prefix_len])
    )
    return Repeated(len(tokens), len(behind))


def shared_len(path: Ids, others: list[Ids]) -> int:
    return max((n for other in others for n in range(len(path) + 1) if path[:n] == other[:n]), default=0)


@given(calls=CALLS)
def test_it_agrees_with_a_set_of_windows(calls: list[tuple[Ids, int, int]]) -> None:
    search, seen = WindowSearch(SHORT), set[tuple[int, ...]]()
    earlier: list[Ids] = []
    for path, prompt_len, prefix_len in calls:
        prompt = min(prompt_len, len(path))
        # What lies before `prefix_len` is to begin an earlier path.
        prefix = min(prefix_len, prompt, shared_len(path, earlier))
        found = search.observe(as_tokens(path), prompt_len=prompt, prefix_len=prefix)
        assert found == brute(seen, path, prompt, prefix, SHORT)
        earlier.append(path)


def test_memory_is_eight_bytes_a_distinct_window_and_arrays_stay_few() -> None:
    rng = np.random.default_rng(2)
    search = WindowSearch()
    for _ in range(200):
        path = rng.integers(0, 50_000, 500, dtype=np.int32)
        for _ in range(2):
            search.observe(path, prompt_len=len(path), prefix_len=0)
    assert sum(len(seen) for seen in search._seen) == 200 * (500 - WINDOW_LEN + 1)
    assert len(search._seen) <= 10


HEAD, BODY = list(range(100, 150)), list(range(300, 400))
NOTHING = as_tokens([])


def plan_of(donor: Ids, prompt: Ids, fields: list[tuple[int, int]]) -> Plan:
    """A run over `BODY`, which ends both."""
    places = {"target_start": len(prompt) - 60, "target_end": len(prompt) - 1, "donor_start": len(donor) - 60}
    run = Run(**places, donor=Path("a", [as_tokens(donor)]), seam_len=0, context=Context.CHANGED)
    return Plan(prefix_len=50, end=len(prompt), runs=(run,), changed_fields=tuple(fields))


@pytest.mark.parametrize("old", [[1], [1, 2, 3, 4], []])
@pytest.mark.parametrize("new", [[9], [9, 8], []])
def test_the_old_value_stands_between_the_same_flanks(old: Ids, new: Ids) -> None:
    start, end = len(HEAD), len(HEAD) + len(new)
    prompt = HEAD + new + BODY
    (found,) = changed_fields(plan_of(HEAD + old + BODY, prompt, [(start, end)]), as_tokens(prompt), NOTHING)
    assert (found.start, found.end, found.old.tolist()) == (start, end, old)
