"""Inputs that are meant to hurt: no text, hash, trie or bound may make the core wrong, unsound or slow.

Work is counted, not timed: tokens compared and donors looked at (`IndexStats.num_work`), names computed, paths joined.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from core_builders import CLOSE, DELIMITERS, donor_spans, index_of, join, plan_of, publish, spans, text
from msgspec.structs import replace

from sglang_pic.core import (
    MOST_REUSE,
    ContentIndex,
    CoreConfig,
    CostModel,
    DropReason,
    Path,
    PlanOptions,
    Tokens,
    as_tokens,
)
from sglang_pic.core.chunker import HashFunction, xxh3_name
from sglang_pic.core.ending_filter import ENDING_LEN, ending_hashes
from sglang_pic.core.invariants import check

UNBOUNDED = CoreConfig(edit="in_place", seam_tokens=1, tail_tokens=0, max_index_tokens=1 << 40, max_index_bytes=1 << 44)
MAX_PER_ENDING = 32
# What a plan may do for each token of a prompt, beside a constant.
MAX_WORK = 34


class CountingHash:
    """Names chunks and counts the calls."""

    def __init__(self, name: HashFunction = xxh3_name) -> None:
        self.num_calls = 0
        self._name = name

    def __call__(self, data: memoryview) -> int:
        self.num_calls += 1
        return self._name(data)


MILLION = 1_000_000
LONG: dict[str, Callable[[], Tokens]] = {
    "one token": lambda: as_tokens(np.full(MILLION, 7)),
    "period 2": lambda: np.resize(as_tokens([7, 8]), MILLION),
    "period 3": lambda: np.resize(as_tokens([7, 8, 9]), MILLION),
    "period 64": lambda: np.resize(text(0, 64), MILLION),
    "one message": lambda: np.resize(join(CLOSE, text(0, 40)), MILLION),
    "two ids at random": lambda: as_tokens(np.random.default_rng(0).integers(5, 7, MILLION)),
    "noise": lambda: text(0, MILLION),
    "noise and repeats": lambda: np.hstack([np.tile(text(0, 64), (15_000, 1)), text(1, 45_000).reshape(-1, 3)]).ravel(),
}


# Beside the settings what a plan may do for each token, and how many it may leave: with the defaults the tail too.
@pytest.mark.parametrize(
    ("config", "most_work", "most_computed"),
    [(MOST_REUSE, 8, 200), (CoreConfig(edit="in_place"), 10, 400)],
    ids=["most", "defaults"],
)
@pytest.mark.parametrize("kind", LONG)
def test_a_million_tokens_are_linear_work(kind: str, config: CoreConfig, most_work: int, most_computed: int) -> None:
    tokens = LONG[kind]()
    hash_function = CountingHash()
    index = ContentIndex(config, hash_function=hash_function)
    publish(index, text(1, 50), tokens)
    # One for each chunk, none of which is looked up if it has fewer than eight tokens.
    assert hash_function.num_calls <= MILLION / 8 + 10
    hash_function.num_calls = 0
    plan = plan_of(index, text(2, 70), tokens, text(3, 9))
    assert index.stats().num_work <= most_work * MILLION
    assert hash_function.num_calls <= MILLION / 100
    assert plan.num_computed <= most_computed
    assert len(plan.runs) <= 4
    hash_function.num_calls = 0
    work = index.stats().num_work
    assert not plan_of(index, text(4, MILLION)).runs, "nothing of it was ever there"
    assert index.stats().num_work - work <= MILLION / 100
    assert hash_function.num_calls <= MILLION / 1_000


def test_a_search_that_has_used_up_its_budget_ends_and_says_so() -> None:
    """One token again and again, behind two headers: donors near the end are looked at at every place."""
    tokens = as_tokens(np.full(4_000, 7))
    index = index_of(join(text(40, 40), tokens), join(text(55, 55), tokens), config=CoreConfig(edit="in_place"))
    plan = plan_of(index, text(70, 70), tokens)
    assert plan.dropped[DropReason.BUDGET] == 1
    assert plan.num_computed < 400
    check(index)


@pytest.mark.parametrize("length", range(4))
@pytest.mark.parametrize("ids", [[7, 7, 7, 7], [7, 8, 7, 8], [-1, 0, 1, 2]])
def test_prompts_of_hardly_any_tokens(ids: list[int], length: int) -> None:
    index = ContentIndex(replace(MOST_REUSE, sink_tokens=0, min_run_tokens=1, min_spliced_tokens=1))
    prompt = as_tokens(ids[:length])
    index.publish("a", prompt, [(0, length)], spliced=[(0, 1)], delimiters=frozenset({7}))
    publish(index, np.resize(as_tokens(ids), 200))
    for prefix_len in range(length + 1):
        plan = plan_of(index, prompt, prefix_len=prefix_len)
        assert (plan.num_computed, plan.runs) == (length - prefix_len, ())
    index.forget("a", prompt, 0)
    check(index)


def test_equal_chunks_thousands_of_times_are_few_donors() -> None:
    """In one publication, and in many."""
    message = join(CLOSE, text(0, 40))
    index = index_of(np.resize(message, 41 * 5_000))
    once = index.stats()
    assert once.num_donors <= 2 * once.num_endings <= 20
    for i in range(2_000):
        publish(index, text(1_000 + i, 5), message, message[:1])
    assert index.stats().num_donors <= 4 * index.stats().num_endings
    assert index.stats().num_endings <= once.num_endings + 10
    check(index)


def crowd(num_chunks: int, hash_function: HashFunction = xxh3_name) -> tuple[ContentIndex, Tokens]:
    """An index with many chunks that end in the same ending, and that ending."""
    ending = text(0, ENDING_LEN)
    index = ContentIndex(UNBOUNDED, hash_function=hash_function)
    for i in range(num_chunks):
        publish(index, text(1 + i, 40), CLOSE, text(9_000 + i, 1 + i % 7), ending, CLOSE)
    return index, ending


def test_thousands_of_chunks_with_one_ending_are_a_short_list() -> None:
    index, ending = crowd(3_000)
    (table,) = (space.donors for space in index._namespaces.values())
    assert len(table.of(int(ending_hashes(ending)[0]))) == MAX_PER_ENDING
    assert len(table) == index.stats().num_endings + MAX_PER_ENDING - 1, "no other ending has two"
    check(index)


def test_a_prompt_full_of_a_crowded_ending_is_bounded_work() -> None:
    hash_function = CountingHash()
    index, ending = crowd(100, hash_function)
    hash_function.num_calls = 0
    prompt = np.resize(ending, 40_000)
    assert not plan_of(index, prompt).runs
    assert index.stats().num_work <= MAX_WORK * len(prompt) + (1 << 17)
    assert 8 * hash_function.num_calls <= index.stats().num_work, "names that are computed are work too"


def test_a_crowded_ending_does_not_hide_what_follows_it() -> None:
    index, ending = crowd(100)
    body = text(77_777, 3_000)
    publish(index, text(77_778, 60), body)
    plan = plan_of(index, text(77_779, 50), np.resize(ending, 2_000), body, text(77_780, 9))
    assert plan.num_spliced == 2_999


def test_thousands_of_tiny_namespaces() -> None:
    index = ContentIndex(MOST_REUSE)
    path = text(0, 150)
    prompt = join(text(1, 40), path[40:], text(2, 9))
    names = [f"user {i}" for i in range(2_000)]
    for name in names:
        publish(index, path, namespace=name)
    assert index.stats().num_namespaces == 2_000
    assert index.stats().num_tokens == 2_000 * 150
    assert plan_of(index, prompt, namespace=names[1_234]).runs
    index.flush(names[1_234])
    assert not plan_of(index, prompt, namespace=names[1_234]).runs
    assert plan_of(index, prompt, namespace=names[1_235]).runs, "nothing else was flushed"
    check(index)
    index.flush()
    assert index.stats().num_bytes == index.stats().num_namespaces == index.stats().num_endings == 0


@pytest.mark.parametrize("num_names", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_hash_that_hardly_tells_anything_serves_no_foreign_tokens(seed: int, num_names: int) -> None:
    """Names collide always, endings often: a vocabulary of three ids."""
    rng = np.random.default_rng(seed)
    config = replace(MOST_REUSE, min_run_tokens=8, sink_tokens=4)
    index = ContentIndex(config, hash_function=lambda data: xxh3_name(data) % num_names)
    sources = [as_tokens(rng.integers(0, 3, 200)) for _ in range(4)]
    num_runs = 0
    for _ in range(60):
        parts = [sources[i][a : a + 60] for i, a in zip(rng.integers(0, 4, 4), rng.integers(0, 150, 4), strict=True)]
        prompt = join(*parts)
        num_runs += len(plan_of(index, prompt).runs)
        publish(index, prompt)
    check(index)
    assert num_runs > 50


def colliding_windows() -> list[tuple[Tokens, Tokens]]:
    """Different spans of eight tokens with equal ending hashes: by the birthday paradox, of 2^19 there are some."""
    tokens = text(11, 1 << 19)
    hashes = ending_hashes(tokens)
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    return [
        (tokens[a : a + ENDING_LEN], tokens[b : b + ENDING_LEN])
        for a, b in zip(order[same].tolist(), order[same + 1].tolist(), strict=True)
    ]


def constant_name(data: memoryview) -> int:
    return 0


@pytest.mark.parametrize("hash_function", [xxh3_name, constant_name])
def test_colliding_endings_serve_no_foreign_tokens(hash_function: HashFunction) -> None:
    """The filter and the ending say yes, and with a constant name that does too: the tokens decide."""
    pairs = colliding_windows()
    assert len(pairs) >= 10
    for known, other in pairs:
        assert known.tolist() != other.tolist()
        index = ContentIndex(
            replace(MOST_REUSE, min_run_tokens=8),
            hash_function=hash_function,
        )
        # Eight tokens between two delimiters are one chunk: its name and its ending are all there is to find it by.
        prompts = [join(text(seed, 70), CLOSE, window, CLOSE, text(9, 20)) for seed, window in ((1, known), (2, other))]
        index.publish("a", prompts[0], [(70, 80)], delimiters=DELIMITERS)
        assert plan_of(index, prompts[1]).runs == ()
        index.publish("a", prompts[1], [(70, 80)], delimiters=DELIMITERS)
        assert (index.stats().num_donors, index.stats().num_endings) == (2, 1), "both are donors under one ending"
        for seed, window in ((3, known), (4, other)):
            assert spans(plan_of(index, text(seed, 50), CLOSE, window, CLOSE, text(8, 20))) == [(51, 60)]
        check(index)


@pytest.mark.parametrize("base", [-(2**31), -5, 2**31 - 400])
def test_token_ids_may_be_anything_an_int32_can_hold(base: int) -> None:
    ids = base + np.random.default_rng(3).permutation(400)
    path, opening = as_tokens(ids), int(ids[150])
    index = ContentIndex(MOST_REUSE)
    index.publish("a", path, [(0, 400)], delimiters=frozenset({opening, 2**31 - 1, -(2**31)}))
    assert donor_spans(plan_of(index, text(1, 50), path[100:], as_tokens([base, 2**31 - 1]))) == [(101, 400)]
    index.forget("a", path, 200)
    assert index.stats().num_tokens == 200
    check(index)


def test_a_conversation_of_thousands_of_turns() -> None:
    """Shorter and shorter prefixes cut one path into as many nodes as turns, then it goes on."""
    path = text(0, 40_000)
    index = index_of(path)
    for end in range(39_980, 0, -20):
        index.publish("a", path[:end], [])
    assert index.stats().num_nodes == 2_000
    assert index.stats().num_paths == 1
    longer = join(path, text(1, 300))
    index.publish("a", longer, [(40_000, 40_300)])
    check(index)
    paths: dict[int, Path] = {}

    def resolve(donor: Path, end: int) -> int:
        paths[id(donor)] = donor
        return end

    assert donor_spans(plan_of(index, text(2, 60), longer, text(3, 9), resolve=resolve)) == [(33, 40_300)]
    # Two hundred runs of one conversation, backwards: its tokens are joined once, not once for each run.
    parts = [join(path[at : at + 120], text(at, 3)) for at in range(39_800, 100, -200)]
    assert len(plan_of(index, text(4, 60), *parts, resolve=resolve).runs) >= 195
    assert len(paths) == 2, "one in each plan"
    check(index)


def test_a_trie_that_branches_at_every_token() -> None:
    path = text(0, 500)
    index = index_of(path)
    for at in range(499, 0, -1):
        publish(index, path[:at], text(at, 30))
    assert index.stats().num_paths == 500
    check(index)
    assert donor_spans(plan_of(index, text(1_000, 60), path, text(1_001, 9))) == [(33, 500)]
    # Down a branch, not only along the stem.
    prompt = join(text(1_000, 60), path[:300], text(300, 30), text(1_001, 9))
    assert [(run.donor_start, run.donor_end) for run in plan_of(index, prompt).runs] == [(33, 330)]


@pytest.mark.parametrize("position", [*range(-1, 12), 60, 64, 65, 99, 100, 101, 129, 130, 131, 400])
def test_forgetting_at_any_position_leaves_the_rest(position: int) -> None:
    stem, left, right = text(0, 65), text(1, 66), text(2, 40)
    index = ContentIndex(replace(MOST_REUSE, sink_tokens=0, min_run_tokens=8))
    path = join(stem, left)
    for tokens in (path, join(stem, right), join(stem[:10], right)):
        publish(index, tokens)
    index.forget("a", path, position)
    check(index)
    kept = max(position, 0)
    expected = min(kept, 131) + (0 if kept < 65 else 40) + (0 if kept < 10 else 40)
    if kept in (0, 10, 65):
        # At a branch only the branch that the path takes goes, and what it shares with no other one.
        expected = {0: 0, 10: 10 + 40, 65: 65 + 40 + 40}[kept]
    assert index.stats().num_tokens == expected
    held = index.stats()
    index.forget("a", path, position)
    index.forget("nobody", path, 0)
    assert index.stats() == held, "what is forgotten is forgotten"
    publish(index, path)
    assert donor_spans(plan_of(index, text(3, 20), path, text(4, 5))) == [(1, 131)]
    check(index)


@pytest.mark.parametrize("max_index_tokens", [1, 7, 8, 99, 100, 101, 350])
def test_a_tiny_bound_in_tokens_holds(max_index_tokens: int) -> None:
    index = ContentIndex(replace(MOST_REUSE, max_index_tokens=max_index_tokens, sink_tokens=0, min_run_tokens=8))
    stem = text(0, 50)
    num_published = 0
    for i in range(40):
        path = join(stem[: i % 51], text(1 + i % 9, 10 + 5 * i))
        publish(index, path)
        num_published += len(path)
        check(index)
        plan_of(index, text(100, 9), path)
    assert index.stats().num_evicted_tokens <= num_published - index.stats().num_tokens
    publish(index, text(200, max_index_tokens))
    assert index.stats().num_tokens == max_index_tokens, "a path that just fits stays, alone"
    publish(index, text(201, max_index_tokens + 1))
    assert index.stats().num_tokens == index.stats().num_namespaces == 0, "a path that does not fit at all goes"
    check(index)


@pytest.mark.parametrize("max_index_bytes", [1 << 16, 1 << 17, 1 << 19])
def test_a_tiny_bound_in_bytes_holds(max_index_bytes: int) -> None:
    index = ContentIndex(CoreConfig(edit="in_place", seam_tokens=1, tail_tokens=0, max_index_bytes=max_index_bytes))
    for i in range(300):
        publish(index, text(i % 7, 60), text(10 + i, 200 + 3 * i), namespace="ab"[i % 2])
        if i % 20 == 0:
            check(index)
    stats = index.stats()
    assert 0.5 * max_index_bytes < stats.num_bytes <= max_index_bytes
    last = text(10 + 299, 200 + 3 * 299)
    assert plan_of(index, text(1_000, 60), last, text(1_001, 9), namespace="b").num_spliced == len(last) - 1
    publish(index, text(2_000, max_index_bytes // 4), namespace="b")
    assert index.stats().num_bytes <= max_index_bytes, "its tokens alone fill the bound"
    check(index)


def test_a_flush_in_the_middle_leaves_no_trace() -> None:
    """The same calls after a flush give the same plans as on an index that was never used."""
    used, fresh = ContentIndex(MOST_REUSE), ContentIndex(MOST_REUSE)
    for i in range(50):
        publish(used, text(i % 5, 200), text(i, 100), namespace="ab"[i % 2])
    used.flush()
    for i in range(60):
        prompt = join(text(100 + i, 40), text(i % 4, 150), text(i % 3 + 10, 150))
        plans = [plan_of(index, prompt) for index in (used, fresh)]
        assert plans[0] == plans[1]
        for index, plan in zip((used, fresh), plans, strict=True):
            index.publish("a", prompt, plan.gaps, spliced=spans(plan))
        if i == 30:
            for index in (used, fresh):
                index.flush("a")
    check(used)
    assert used.stats().num_bytes == fresh.stats().num_bytes


@pytest.mark.parametrize("length", [100, 400, 1_600])
def test_spans_that_do_not_pay_are_looked_at_once(length: int) -> None:
    """Not once for every chunk in them: what pays behind them must still be found."""
    bodies = [text(i, length) for i in range(32_000 // length)]
    index = ContentIndex(UNBOUNDED)
    for copy in range(4):
        parts = [join(body, text(10_000 + 4 * i + copy, 5)) for i, body in enumerate(bodies)]
        publish(index, text(9_000 + copy, 50), *parts)
    long = text(8_000, 4_000)
    publish(index, text(8_001, 50), long)
    cost = CostModel(computed_token_us=2.0, spliced_token_us=1.0, gap_us=2_000.0)
    prompt = join(text(7_000, 60), *(join(body, text(20_000 + i, 5)) for i, body in enumerate(bodies)), long)
    plan = plan_of(index, prompt, options=PlanOptions(cost=cost))
    assert [run.num_tokens for run in plan.runs] == [3_998]
    assert index.stats().num_work <= 24 * len(prompt)
    assert plan.dropped[DropReason.COST_GATE] <= 4 * len(bodies)


def test_many_revoked_spans_of_a_long_path() -> None:
    path = text(0, 200_000)
    index = index_of(path)
    spliced = [(at, at + 10) for at in range(100, 200_000, 50)]
    index.publish("a", path, [], spliced=spliced)
    check(index)
    plan = plan_of(
        index, text(1, 60), path[1_000:2_000], options=PlanOptions(policy=replace(MOST_REUSE, min_run_tokens=1))
    )
    assert 0 < plan.num_spliced <= 1_000 * 40 / 50
    for run in plan.runs:
        assert not any(a < run.donor_end and run.donor_start < b for a, b in spliced)


def test_a_table_gives_back_what_a_long_path_needed() -> None:
    """Else every namespace would keep the memory of the longest path it ever held, which no bound counts."""
    small, large = text(0, 200), text(1, 200_000)
    index = index_of(small, large)
    (table,) = (space.donors for space in index._namespaces.values())
    assert len(table.nodes) > 10_000
    index.forget("a", large, 0)
    check(index)
    assert len(table.nodes) <= 300
    assert len(table.starts) == len(table.names) == len(table.nodes)
    assert plan_of(index, text(2, 40), small[40:], text(3, 9)).num_spliced == 159
    publish(index, large)
    check(index)
    assert plan_of(index, text(2, 40), large[40:900], text(3, 9)).num_spliced == 859
