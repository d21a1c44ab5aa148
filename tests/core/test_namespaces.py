"""Nothing crosses a namespace of the index, and no hash decides what is served: tokens do.

The weakest hashes that could be injected stand in for collisions: of names, of endings, of the filter.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pic_bench.probe_plugin.invariants import check

from sglang_pic.core import ContentIndex, CoreConfig, Tokens, load_loops, token_loops
from sglang_pic.core.chunker import HashFunction, xxh3_name
from sglang_pic.core.token_loops import Hashes
from tests.helpers.core_builders import CLOSE, DELIMITERS, donor_spans, join, plan_of, publish_rows, spans, text

CONFIG = CoreConfig(
    edit="in_place", seam_tokens=0, tail_tokens=0, sink_tokens=2, min_run_tokens=8, min_spliced_tokens=8
)
NAMESPACES = ("", "a", "a\x1f", "b", None, ("a", "b"), ("a", None))


def four_bits(data: memoryview) -> int:
    return xxh3_name(data) & 15


def constant(data: memoryview) -> int:
    return 0


@pytest.fixture(params=[32, 4, 0], ids=lambda bits: f"{bits}_bits")
def endings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of endings, in the whole index: 4 bits, or none, in place of 32, over all of the filter's slots."""
    if request.param == 32:
        return

    load_loops()
    whole = token_loops.hash_endings

    def hashes(tokens: Tokens) -> Hashes:
        return (whole(tokens) & np.uint32((1 << request.param) - 1)) * np.uint32(0x9E3779B1)

    monkeypatch.setattr(token_loops, "hash_endings", hashes)


@pytest.mark.usefixtures("endings")
@pytest.mark.parametrize("hash_function", [xxh3_name, four_bits, constant])
def test_colliding_hashes_serve_only_equal_tokens_of_the_namespace(hash_function: HashFunction) -> None:
    """Against a plain model: each run is a place in what this namespace computed, and equals it token by token."""
    num_found = 0

    @settings(max_examples=25)
    @example([("a", [0, 1, 2]), ("b", [1]), ("a", [2, 1, 0])])
    @given(st.lists(st.tuples(st.sampled_from(NAMESPACES), st.lists(st.integers(0, 5), max_size=6)), max_size=14))
    def run(calls: list[tuple[object, list[int]]]) -> None:
        nonlocal num_found
        index = ContentIndex(CONFIG, hash_function=hash_function)
        computed: defaultdict[object, list[tuple[Tokens, np.ndarray]]] = defaultdict(list)
        for number, (namespace, parts) in enumerate(calls):
            prompt = join(text(100 + number, 5), *(join(text(part, 30), CLOSE) for part in parts))
            plan = plan_of(index, prompt, namespace=namespace)
            num_found += len(plan.runs)
            for found in plan.runs:
                donor = found.donor.tokens(found.donor_end)
                assert any(
                    np.array_equal(tokens[: found.donor_end], donor)
                    and is_own[found.donor_start : found.donor_end].all()
                    for tokens, is_own in computed[namespace]
                ), "the donor's rows were computed by a request of this namespace, behind these very tokens"
            spliced = spans(plan)
            publish_rows(index, namespace, prompt, plan.gaps, spliced=spliced, delimiters=DELIMITERS)
            is_own = np.ones(len(prompt), dtype=np.bool_)
            for start, end in spliced:
                is_own[start:end] = False
            computed[namespace].append((prompt, is_own))
        check(index)

    run()
    assert num_found, "else nothing would be shown"


@pytest.mark.parametrize("edit", ["in_place", "notes", "recompile"])
def test_a_namespace_plans_as_if_it_were_alone(edit: str) -> None:
    """The same plans for the same work: what others computed can be told neither by tokens nor by time."""
    config = CoreConfig(edit=edit, tail_tokens=0)
    alone, shared, num_spliced = ContentIndex(config), ContentIndex(config), 0
    for i in range(30):
        publish_rows(shared, "theirs", join(text(500 + i, 40), text(i % 6, 400)), [(0, 440)])
    for i in range(12):
        prompt = join(text(900 + i, 50), text(i % 6, 400), text(i % 4, 300))
        work = [index.num_work for index in (alone, shared)]
        plans = [plan_of(index, prompt, namespace="mine") for index in (alone, shared)]
        assert i >= 4 or not plans[0].runs, "what others computed is not found"
        num_spliced += plans[0].num_spliced
        assert spans(plans[0]) == spans(plans[1])
        assert donor_spans(plans[0]) == donor_spans(plans[1])
        assert plans[0].dropped == plans[1].dropped
        grown = [index.num_work - before for index, before in zip((alone, shared), work, strict=True)]
        assert grown[0] == grown[1]
        for index, plan in zip((alone, shared), plans, strict=True):
            publish_rows(index, "mine", prompt, plan.gaps, spliced=spans(plan))
    assert num_spliced > 500, "its own is"


@pytest.mark.parametrize("number", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_tiny_requests_stay_within_the_bounds(number: int) -> None:
    """Of one tenant, in one namespace and in thousands; what another one plans then costs what it did before."""
    config = CoreConfig(max_index_bytes=1 << 20)
    index = ContentIndex(config)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 50_000, 4 * number).astype("<i4")
    for i in range(number):
        publish_rows(index, i % 3_000 if i % 2 else "one", ids[4 * i : 4 * i + 4], [(0, 4)])
        if i % (number // 4) == 0:
            assert index.num_bytes <= config.max_index_bytes
            check(index)
    assert index.num_bytes <= config.max_index_bytes
    before = index.num_work
    assert not plan_of(index, text(7, 4_000), namespace="one").runs
    assert index.num_work - before <= 4_000
