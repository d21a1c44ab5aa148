"""The guard of changed fields: what is computed behind one, how often rows are renewed; and words in token ids."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pic_bench.probe_plugin.invariants import check

from sglang_pic.core import MESSAGE_BREAK, ContentIndex, CoreConfig, Lexicon, Tokens, as_tokens
from sglang_pic.core.plan import Context, DropReason, Plan, PlanOptions
from tests.helpers.core_builders import plan_of, publish_rows, spans

Edit = Literal["notes", "in_place", "recompile"]
EDITS: tuple[Edit, Edit] = ("in_place", "recompile")

# Ids are words: signs, then fields and their values, then the words of any text.
SIGNS = ["\n", ":", "."]
NAMES = [" shelf", " alpha", " beta", " gamma", " delta", " keeper", " 17", " 42", " not", " Ann", " Bea"]
LEXICON = Lexicon([*SIGNS, *NAMES, *(f" w{number}x" for number in range(4_000)), MESSAGE_BREAK])
NEWLINE, COLON, STOP = range(3)
SHELF, ALPHA, BETA, GAMMA, DELTA, KEEPER, SEVENTEEN, FORTY_TWO, NOT, ANN, BEA = range(
    len(SIGNS), len(SIGNS) + len(NAMES)
)
FIRST_WORD = len(SIGNS) + len(NAMES)
# Words from here on stand in no text but where a test puts them.
FIRST_VALUE = FIRST_WORD + 2_000
CONFIG = CoreConfig(seam_tokens=32, tail_tokens=0)
TAIL, SEAM = CONFIG.edit_tail_tokens, CONFIG.seam_tokens


def filler(length: int, seed: int | np.random.Generator) -> list[int]:
    """Text of lines of twenty words: the same for the same seed, the next one of a generator."""
    words = np.random.default_rng(seed).integers(FIRST_WORD, FIRST_VALUE, length)
    words[19::20] = NEWLINE
    return [int(word) for word in words]


def served(prompt: list[int], index: ContentIndex, policy: CoreConfig | None = None) -> Plan:
    """Plan a prompt as a server would, and publish it."""
    tokens = as_tokens(prompt)
    plan = plan_of(index, tokens, options=PlanOptions(policy=policy))
    generations = [(run.target_start, run.generation) for run in plan.runs]
    publish_rows(index, "a", tokens, [(0, len(tokens))], spliced=spans(plan), generations=generations)
    check(index)
    return plan


def second_plan(first: list[int], second: list[int], edit: Edit = "notes", lexicon: Lexicon | None = LEXICON) -> Plan:
    """Of two prompts one after the other."""
    index = ContentIndex(CONFIG, lexicon=lexicon)
    served(first, index)
    return served(second, index, replace(CONFIG, edit=edit))


_TEXTS = np.random.default_rng(11)
HEAD, BODY, MORE, QUESTION = (filler(length, _TEXTS) for length in (60, 300, 300, 40))


def prompt_with(value: int, *, mention: int = BETA) -> list[int]:
    """A shelf's value near the top, a line that names one value in the middle, a question."""
    # Its other words stand nowhere else: nothing is concluded from it.
    line = [NEWLINE, KEEPER, mention, COLON, *range(FIRST_VALUE + 200, FIRST_VALUE + 206), NEWLINE]
    return [*HEAD, SHELF, COLON, value, STOP, NEWLINE, *BODY, *line, *MORE, *QUESTION]


def is_spliced(plan: Plan, start: int, end: int) -> bool:
    return any(run.target_start < end and run.target_end > start for run in plan.runs)


FIELD = len(HEAD) + 2
MENTION = FIELD + 3 + len(BODY) + 2
END = MENTION + 9 + len(MORE) + len(QUESTION)


@pytest.mark.parametrize("mention", [ALPHA, BETA], ids=["old", "new"])
def test_notes_compute_what_names_the_field_and_splice_the_rest(mention: int) -> None:
    plan = second_plan(prompt_with(ALPHA, mention=mention), prompt_with(BETA, mention=mention))
    assert plan.end == END
    assert plan.changed_fields == ((FIELD, FIELD + 1),)
    assert spans(plan) == [(FIELD + 1 + SEAM, MENTION - 1), (MENTION + 24, END - TAIL)]
    assert {run.context for run in plan.runs} == {Context.CHANGED}
    assert plan.num_behind_change == plan.num_spliced
    assert plan.guarded == ((MENTION - 1, MENTION + 24), (END - TAIL, END - 1))


@pytest.mark.parametrize("place", [0, 40, 89])
def test_what_names_a_removed_text_is_computed(place: int) -> None:
    # Its first words, its middle and its last ones are named.
    removed = [*range(FIRST_VALUE + 300, FIRST_VALUE + 390), NEWLINE]
    prompt = prompt_with(BETA, mention=removed[place])
    plan = second_plan([*HEAD, *removed, *prompt[len(HEAD) :]], prompt)
    assert plan.changed_fields == ((len(HEAD), len(HEAD)),)
    assert not is_spliced(plan, MENTION, MENTION + 1)
    assert plan.num_spliced > 450


def test_in_place_splices_and_recompile_computes_everything_behind_the_field() -> None:
    in_place, recompile = (second_plan(prompt_with(ALPHA), prompt_with(BETA), edit) for edit in EDITS)
    assert is_spliced(in_place, MENTION, MENTION + 1)
    assert in_place.guarded == ()
    assert in_place.num_behind_change == in_place.num_spliced > 550
    assert recompile.runs == ()
    assert recompile.num_guarded == in_place.num_spliced
    assert recompile.dropped[DropReason.CHANGED_FIELD] == 1


def test_without_texts_everything_behind_the_field_is_computed() -> None:
    assert second_plan(prompt_with(ALPHA), prompt_with(BETA), lexicon=None).runs == ()


@pytest.mark.parametrize(
    ("old", "new", "more", "is_all"),
    [
        ([ALPHA], [BETA], [], True),
        ([ALPHA], [BETA], [KEEPER, BETA], False),
        ([ALPHA], [FIRST_VALUE], [], False),
        ([ANN], [BEA], [], False),
        ([ALPHA], [NOT, ALPHA], [KEEPER, ALPHA, NEWLINE, KEEPER, NOT], True),
        ([ALPHA, GAMMA, DELTA], [BETA], [], False),
    ],
    ids=["a word", "a word that is named", "no word", "a name", "a denial", "many words"],
)
def test_what_follows_from_a_value_may_be_said_in_other_words(
    old: list[int], new: list[int], more: list[int], is_all: bool
) -> None:
    """What depends on a word that nothing names, or on whether a clause is true, could stand anywhere behind it."""
    rest = [NEWLINE, *BODY, NEWLINE, *more, NEWLINE, *MORE, *QUESTION]
    plan = second_plan([*HEAD, SHELF, COLON, *old, *rest], [*HEAD, SHELF, COLON, *new, *rest])
    assert (plan.runs == ()) is is_all
    assert plan.changed_fields


HALL, YARD, STORED = range(FIRST_VALUE + 10, FIRST_VALUE + 13)


def chain(value: int, *, again: list[int]) -> list[int]:
    """Two lines that name a value each and a word that follows from it; further on other lines."""
    lines = [NEWLINE, ALPHA, STORED, YARD, NEWLINE, BETA, STORED, HALL, NEWLINE]
    return [*HEAD, SHELF, COLON, value, STOP, NEWLINE, *BODY, *lines, *MORE, NEWLINE, *again, NEWLINE, *BODY, *QUESTION]


@pytest.mark.parametrize(
    ("again", "is_computed"),
    [
        ([KEEPER, HALL, STOP], True),
        ([KEEPER, YARD, STOP], True),
        ([KEEPER, STORED, STOP], False),
        ([*[KEEPER, HALL, *filler(30, 5), NEWLINE] * 3, KEEPER, HALL, STOP], False),
        ([KEEPER, STOP], False),
    ],
    ids=["new", "old", "on both lines", "in many places", "nothing"],
)
def test_what_a_line_concludes_from_a_value_is_computed_again(again: list[int], is_computed: bool) -> None:
    plan = second_plan(chain(ALPHA, again=again), chain(BETA, again=again))
    keeper = FIELD + 3 + len(BODY) + 9 + len(MORE) + 1
    assert is_spliced(plan, keeper - 8, keeper - 4)
    assert is_spliced(plan, keeper, keeper + 2) is not is_computed


OFTEN = FIRST_VALUE


def test_a_frequent_word_counts_near_the_label_only() -> None:
    """The values are the words of the text itself; one of the many places is on a line with the label."""
    parts = [[*filler(60, 10 + number), OFTEN, *filler(60, 30 + number)] for number in range(12)]
    # Words that stand nowhere else: nothing is concluded from this line.
    own = range(FIRST_VALUE + 100, FIRST_VALUE + 134)
    parts[6] += [NEWLINE, SHELF, *own[:4], OFTEN, *own[4:]]
    rest = [token for part in parts for token in part] + QUESTION
    field = [*HEAD, SHELF, COLON, OFTEN]
    plan = second_plan([*field[:-1], OFTEN + 1, NEWLINE, *rest], [*field, NEWLINE, *rest])
    label = len(field) + 1 + rest.index(SHELF)
    places = [len(field) + 1 + at for at, token in enumerate(rest) if token == OFTEN]
    near = [place for place in places if abs(place - label) <= 24]
    assert len(places) == 13
    assert len(near) == 1
    assert not is_spliced(plan, near[0], near[0] + 24)
    assert all(is_spliced(plan, place, place + 1) for place in places if abs(place - near[0]) > 60 and place < 1_300)


def test_rows_computed_under_the_same_value_come_first() -> None:
    """A donor under another value is fresher and longer, and still not taken."""
    index = ContentIndex(CONFIG, lexicon=LEXICON)
    block = filler(400, 5)
    clean = [*HEAD, SHELF, COLON, BETA, NEWLINE, *block[:200]]
    served([*filler(200, 6), *clean], index)
    served([*filler(220, 7), *HEAD, SHELF, COLON, ALPHA, NEWLINE, *block], index)
    plan = served([*filler(240, 8), *HEAD, SHELF, COLON, BETA, NEWLINE, *block, *QUESTION], index)
    start = 240 + len(HEAD) + 4
    covering = [run for run in plan.runs if run.target_start <= start + 100 < run.target_end]
    assert [run.donor_start - run.target_start for run in covering] == [-40]


def test_a_field_that_nothing_names_costs_nothing_but_the_end_and_no_generation() -> None:
    index = ContentIndex(CONFIG, lexicon=LEXICON)
    history: list[int] = []
    for turn in range(12):
        history += filler(150, 100 + turn)
        clock = FIRST_VALUE + turn
        plan = served([*HEAD, KEEPER, COLON, clock, NEWLINE, *history, *QUESTION], index)
        assert plan.num_guarded <= TAIL + 3
        assert all(run.generation == 0 for run in plan.runs)
        if turn:
            assert plan.num_spliced >= len(history) - 150 - SEAM - TAIL - 150


@pytest.mark.parametrize("max_generation", [0, 1, 2, 5])
def test_rows_are_renewed_before_they_have_too_many_changes_behind_them(max_generation: int) -> None:
    index = ContentIndex(replace(CONFIG, max_generation=max_generation), lexicon=LEXICON)
    history: list[int] = []
    spliced, oldest = [], 0
    for turn in range(10 * (max_generation + 1)):
        value = FIRST_VALUE + turn
        history += [NEWLINE, SHELF, value, NEWLINE, *filler(150, 100 + turn)]
        plan = served([*HEAD, SHELF, COLON, value, NEWLINE, *history, *QUESTION], index)
        spliced.append(plan.num_spliced)
        oldest = max([oldest, *(run.generation for run in plan.runs)])
    assert oldest == max_generation + 1
    assert sum(spliced) > 0
    renewed = [turn for turn, (before, now) in enumerate(pairwise(spliced), start=1) if now < before / 2]
    assert len(renewed) >= 2
    assert max(later - earlier for earlier, later in pairwise(renewed)) >= max_generation + 1


class Planted(NamedTuple):
    """A prompt whose fields are named at known places."""

    prompts: list[list[int]]
    mentions: list[int]
    labels: list[int]


def plant(rng: np.random.Generator) -> Planted:
    """One to three fields of one to eight tokens, each named in up to six lines by a word of its own."""
    words = iter(rng.permutation(np.arange(FIRST_VALUE, FIRST_VALUE + 2_000)).tolist())
    lines: list[tuple[str, list[int]]] = [("text", [*filler(20, rng), NEWLINE]) for _ in range(rng.integers(12, 40))]
    fields = []
    for _ in range(rng.integers(1, 4)):
        label, old, new = next(words), next(words), next(words)
        extra = [[next(words) for _ in range(rng.integers(0, 4))] for _ in range(2)]
        fields.append((label, [old, *extra[0]], [new, *extra[1]], filler(int(rng.choice([0, 10, 40])), rng)))
        for _ in range(rng.integers(0, 4)):
            named = [int(rng.choice([old, new]))]
            lines.insert(int(rng.integers(len(lines) + 1)), ("mention", [*named, *filler(8, rng), NEWLINE]))
        if rng.integers(2):
            lines.insert(int(rng.integers(len(lines) + 1)), ("label", [label, *filler(6, rng), NEWLINE]))
    prompts, head = [], filler(int(rng.integers(40, 90)), rng)
    for side in (1, 2):
        prompt = [*head, NEWLINE]
        for field in fields:
            prompt += [field[0], COLON, *field[side], NEWLINE, *field[3], NEWLINE]
        places: dict[str, list[int]] = {"text": [], "mention": [], "label": []}
        for kind, line in lines:
            places[kind].append(len(prompt))
            prompt += line
        prompts.append(prompt)
    return Planted(prompts, places["mention"], places["label"])


def test_no_mention_no_label_and_no_tail_of_a_changed_field_is_ever_spliced() -> None:
    num_runs = 0
    for seed in range(1_000):
        planted = plant(np.random.default_rng(seed))
        index = ContentIndex(CONFIG, lexicon=LEXICON)
        old, new = map(as_tokens, planted.prompts)
        publish_rows(index, "a", old, [(0, len(old))])
        plan = plan_of(index, new)
        behind = [run for run in plan.runs if run.context is Context.CHANGED]
        taken = np.zeros(len(new) + 24, dtype=np.bool_)
        for run in behind:
            taken[run.target_start : run.target_end] = True
        for places, num_tokens in ((planted.mentions, 24), (planted.labels, 3)):
            assert not any(taken[place : place + num_tokens].any() for place in places), seed
        assert not behind or not taken[len(new) - TAIL :].any(), seed
        num_runs += len(behind)
    assert num_runs


PIECES = [" alpha", "alpha", "Alpha", " al", "pha", " the", "18", *'":, .\n1827s_']
WORDS = Lexicon(PIECES)


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=40).map(as_tokens))
def test_places_agree_with_a_search_of_the_text(tokens: Tokens) -> None:
    text = WORDS.text(tokens).casefold()
    (places,) = WORDS.find(["alpha"], tokens).values()
    assert len(places) == len(re.findall(r"(?<![^\W_])alpha(?![^\W_])", text))


def test_a_word_is_found_in_other_tokens_and_unknown_ids_have_no_text() -> None:
    split = as_tokens([PIECES.index(" al"), PIECES.index("pha")])
    assert WORDS.find(["alpha"], split) == {"alpha": [0]}
    tokens = as_tokens([1, 10_000, 1])
    assert WORDS.text(tokens) == "alphaalpha"
    assert WORDS.find(["alpha"], as_tokens([10_000, 1])) == {"alpha": [1]}
