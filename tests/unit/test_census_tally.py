"""Adding outcomes up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from census_fakes import CONFIG, IdsEncoder, session

from sglang_pic.census.outcome import ChangedField, Outcome
from sglang_pic.census.simulate import simulate
from sglang_pic.census.tally import ChangedFields, Counts, Detail, RunLengths, Tally, UpperBound
from sglang_pic.census.windows import WINDOW_LEN, WindowSearch
from sglang_pic.core import Context

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
        run_lengths=RunLengths(p10=194, p50=194, p90=194),
        chunk_tokens_same_session=194,
        chunk_tokens_other_session=194,
        chunk_tokens_by_role={"tool": 194, "user": 194},
        changed_fields=ChangedFields(calls=0, fields=0, chunk_tokens=0, guarded_tokens=0),
        inherited_calls=0,
        upper_bound=UpperBound(window_len=WINDOW_LEN, tokens=400, tokens_behind=400),
    )


def test_a_prompt_that_was_seen_whole_has_nothing_to_find() -> None:
    """Its last token is computed in any case; no search could have spared it."""
    tally = count(simulate([("f", [session("s", [([A], [5]), ([A], [5])])])], IdsEncoder(), config=CONFIG))
    found = counts(tally)
    assert (found.prefix_tokens, found.chunk_tokens, found.new_tokens) == (199, 0, 201)
    assert tally.repeated == (0, 0)


def test_a_turn_that_splices_nothing_stands_on_what_the_one_before_spliced() -> None:
    turns = [([A], [5]), ([B, A], [6]), ([B, A, [6], [7]], [8]), ([A, [5], [9]], [8])]
    tally = count(simulate([("f", [session("s", turns)])], IdsEncoder(), config=CONFIG))
    assert (counts(tally).runs, counts(tally).detail.inherited_calls) == (1, 1)


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


def test_percentiles_are_of_runs() -> None:
    tally = Tally()
    tally.run_lengths.update({10: 1, 20: 8, 1000: 1})
    assert counts(tally).detail.run_lengths == RunLengths(p10=10, p50=20, p90=20)


def test_nothing_counted() -> None:
    found = counts(Tally())
    assert found.recovered is None
    assert found.detail.run_lengths is None
    assert found.detail.upper_bound is None
