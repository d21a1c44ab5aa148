"""What is found: repeats at any alignment, periodic text, fragments, seams, limits; images whole or not at all.

Everything is seeded; the shares are those that were measured, less a small margin.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_bench.probe_plugin.invariants import check

from sglang_pic.core import MEDIA_FROM, ContentIndex, CoreConfig, Lexicon, Span, Tokens, as_tokens
from sglang_pic.core.core_config import MOST_REUSE
from sglang_pic.core.plan import CostModel, DropReason, Plan, PlanOptions
from tests.helpers.core_builders import asking, index_of, join, plan_of, publish_rows, serve, spans, text

SINK = CoreConfig().sink_tokens


def spread(bodies: list[Tokens], rng: np.random.Generator) -> tuple[Tokens, list[int]]:
    """The bodies between random neighbours of random lengths, and where each begins."""
    parts, starts, at = [], [], 0
    for body in bodies:
        neighbour = as_tokens(rng.integers(3, 50_000, int(rng.integers(SINK, 120))))
        starts.append(at + len(neighbour))
        parts += [neighbour, body]
        at += len(neighbour) + len(body)
    return join(*parts, as_tokens(rng.integers(3, 50_000, 20))), starts


@pytest.mark.parametrize(
    ("length", "least"), [(64, 0.985), (80, 0.998), (96, 0.998), (128, 0.998), (256, 0.998), (400, 1.0)]
)
def test_repeats_are_found_at_any_alignment(length: int, least: float) -> None:
    """Every window of 64 tokens is to hold a whole chunk; one in a hundred does not, at that length only."""
    num_found = num_repeats = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        bodies = [as_tokens(rng.integers(3, 50_000, length)) for _ in range(250)]
        index = index_of(spread(bodies, rng)[0])
        order = rng.permutation(len(bodies))
        prompt, starts = spread([bodies[i] for i in order], rng)
        runs = spans(plan_of(index, prompt))
        whole = {(at + 1, at + length) for at in starts}
        assert set(runs) <= whole, "nothing but the planted repeats is equal, and all of it but its seam is spliced"
        num_found += len(runs)
        num_repeats += len(bodies)
    assert num_found / num_repeats >= least


@pytest.mark.parametrize("length", [200, 1_000, 5_000])
@pytest.mark.parametrize("period", [1, 2, 3, 7, 20, 70])
def test_periodic_text_is_found_out_of_phase(period: int, length: int) -> None:
    """Such text is cut by length, not by content: only a scan at every alignment finds it again."""
    unit = text(period, period)
    index = index_of(join(text(100, 91), np.resize(unit, length), text(101, 50)))
    for phase in {0, 1, period // 2, period - 1}:
        body = np.resize(np.roll(unit, -phase), length)
        plan = plan_of(index, text(102, 64), body, text(103, 17))
        # Behind that phase the donor has `phase` tokens less; they are computed where they are too few for a run.
        assert length - plan.num_spliced <= min(phase, 7) + 1
        assert all(64 <= a < b <= 64 + length for a, b in spans(plan))


@pytest.mark.parametrize("length", [6, 8, 30, 63])
def test_a_fragment_between_two_runs_is_spliced_though_it_is_short(length: int) -> None:
    """What was computed between two spliced runs is part of a long equal span; eight of its tokens may be spliced."""
    first, middle, last = text(1, 300), text(2, length), text(3, 300)
    index = index_of(join(text(10, 70), first, text(11, 5)), join(text(12, 80), last, text(13, 5)))
    known = serve(index, text(20, 50), first, middle, last, text(21, 9))
    at = 50 + 300
    assert spans(known) == [(51, at), (at + length + 1, at + length + 300)]
    plan = serve(index, text(30, 66), first, middle, last, text(31, 9))
    at = 66 + 300
    # The seam of the second run was computed too: it belongs to the fragment.
    fragment = [(at, at + length + 1, 0)] if length >= 8 else []
    expected = [(67, at, 1), *fragment, (at + length + 1 + len(fragment), at + length + 300, 1)]
    assert [(run.target_start, run.target_end, run.seam_len) for run in plan.runs] == expected
    check(index)


@pytest.mark.parametrize("context_len", [0, 1, 8, 15, 16, 17, 40])
@pytest.mark.parametrize("before", ["run", "prefix"])
def test_a_run_that_goes_on_in_its_own_context_needs_no_seam(before: str, context_len: int) -> None:
    """After a run, or after the exact prefix; 16 equal tokens of context are enough, 15 are not."""
    left, right = text(1, 200), text(2, 200)
    index = index_of(join(text(10, 70), left, text(11, 60)))
    donor = join(text(12, 80), left[200 - context_len :], right, text(13, 60))
    # The context is no donor: otherwise the run would begin in it.
    publish_rows(index, "a", donor, [(80 + context_len, len(donor))])
    prompt = join(text(20, 50), left, right, text(21, 9))
    prefix_len = 250 if before == "prefix" else 0
    *earlier, run = plan_of(index, prompt, prefix_len=prefix_len).runs
    assert [(other.target_start, other.target_end) for other in earlier] == ([(51, 250)] if before == "run" else [])
    seam_len = 0 if context_len >= 16 else 1
    assert (run.target_start, run.target_end, run.seam_len) == (250 + seam_len, 450, seam_len)


@pytest.mark.parametrize(("at", "runs"), [(5, [(SINK + 1, 300, 1)]), (150, [(SINK, 150, 0), (152, 300, 1)])])
def test_what_follows_the_first_changed_token_is_not_exact(at: int, runs: list[tuple[int, int, int]]) -> None:
    path = text(1, 300)
    index = index_of(path)
    path = path.copy()
    path[at] += 1
    found = plan_of(index, path, text(2, 9)).runs
    assert [(run.target_start, run.target_end, run.seam_len) for run in found] == runs
    assert {run.shift for run in found} == {0}


@given(st.integers(0, 480), st.integers(0, 3))
def test_what_is_to_be_computed_is_computed(compute_from: int, seam_tokens: int) -> None:
    body = text(0, 400)
    index = index_of(join(text(1, 45), body, text(2, 20)))
    prompt = join(text(3, 40), body, text(4, 30))
    plan = plan_of(index, prompt, options=asking(seam_tokens=seam_tokens, compute_from=compute_from))
    start, end = 40 + seam_tokens, min(440, compute_from)
    # The equal span is long enough in any case; of it at least eight tokens are to be spliced.
    assert spans(plan) == ([(start, end)] if end - start >= 8 else [])


@given(st.integers(0, 480), st.none() | st.integers(100, 480))
def test_the_tail_is_computed(tail_tokens: int, compute_from: int | None) -> None:
    """It is counted from the last token whose logits are wanted first."""
    body = text(0, 400)
    index = index_of(join(text(1, 45), body, text(2, 20)))
    prompt = join(text(3, 40), body, text(4, 30))
    plan = plan_of(index, prompt, options=asking(tail_tokens=tail_tokens, compute_from=compute_from))
    last = len(prompt) if compute_from is None else min(len(prompt), compute_from + 1)
    end = min(440, last - max(1, tail_tokens))
    assert spans(plan) == ([(41, end)] if end - 41 >= 8 else [])
    assert plan.runs or plan.dropped.get(DropReason.TAIL) == 1 or last < 60


def test_the_tail_takes_rows_that_were_computed_after_exactly_the_same_tokens() -> None:
    """The tree has lost rows in the middle, so that its own prefix ends before them."""
    head, middle, closing = (text(seed, n) for seed, n in enumerate((300, 100, 100)))
    index = ContentIndex(MOST_REUSE)
    publish_rows(index, "a", join(head, middle, closing), [(0, 300), (400, 500)])
    prompt = join(head, middle, closing, text(6, 5))
    plan = plan_of(index, prompt, prefix_len=300, options=asking(tail_tokens=105))
    assert spans(plan) == [(400, 500)]
    elsewhere = plan_of(index, join(text(7, 9), prompt[9:]), options=asking(tail_tokens=105))
    assert spans(elsewhere) == [(33, 300)]


@pytest.mark.parametrize(("request_us", "gap_us", "num_runs"), [(0.0, 100.0, 2), (0.0, 250.0, 1), (900.0, 100.0, 0)])
def test_the_cost_gate_takes_only_what_pays(request_us: float, gap_us: float, num_runs: int) -> None:
    """Runs of 199 and 599 tokens save a microsecond a token."""
    index = index_of(join(text(1, 50), text(2, 200), text(3, 50), text(4, 600)))
    prompt = join(text(5, 60), text(2, 200), text(6, 70), text(4, 600), text(7, 9))
    cost = CostModel(computed_token_us=1.5, spliced_token_us=0.5, gap_us=gap_us, request_us=request_us)
    plan = plan_of(index, prompt, options=PlanOptions(cost=cost))
    assert len(plan.runs) == num_runs
    assert (plan.dropped.get(DropReason.COST_GATE, 0) > 0) == (num_runs < 2)


POLICY = CoreConfig(tail_tokens=0, sink_tokens=8, seam_tokens=12, min_spliced_tokens=24, min_run_tokens=24)


def image(number: int, length: int) -> Tokens:
    """The tokens of an image, one for each place."""
    return as_tokens(np.arange(length) + MEDIA_FROM + 1_000 * number)


def places(tokens: Tokens) -> tuple[Span, ...]:
    """Where its images are."""
    marks = np.flatnonzero(np.diff(np.r_[False, tokens >= MEDIA_FROM, False]))
    return tuple((int(start), int(end)) for start, end in marks.reshape(-1, 2))


def cuts(plan: Plan, whole: tuple[Span, ...]) -> list[int]:
    """The edges of runs inside images."""
    edges = [edge for span in spans(plan) for edge in span]
    return [edge for edge in edges if any(start < edge < end for start, end in whole)]


def has_seams(plan: Plan) -> bool:
    """Whether each run that does not follow what is served has its seam."""
    served = plan.prefix_len
    for run in plan.runs:
        if run.seam_len < POLICY.seam_tokens and run.target_start != served:
            return False
        served = run.target_end
    return True


@pytest.mark.parametrize("overlap", [0, 20], ids=["with a seam", "adjoining"])
def test_a_run_holds_an_image_whole_or_not_at_all(overlap: int) -> None:
    """Wherever its donors end, a seam would, or a prefill chunk does; what follows a shortened run has a seam."""
    body = join(text(1, 60), image(1, 40), text(2, 70), image(2, 30), text(3, 40))
    prompt = join(text(92, 20), body, text(93, 5))
    policy = msgspec.structs.replace(POLICY, edit="in_place")
    whole, options = places(prompt), PlanOptions(policy=policy)
    held = 0
    for at in range(overlap + 1, len(body), 3):
        # Two donors that part here, so that runs adjoin.
        index = index_of(join(text(90, 30), body[:at]), join(text(91, 47), body[at - overlap :]))
        found = plan_of(index, prompt, options=options, whole=whole)
        assert not cuts(found, whole)
        assert has_seams(found)
        held += sum(start <= first < end for start, end in spans(found) for first, _ in whole)
        for end in range(1, len(prompt) + 1, 7):
            assert not cuts(found.clip(end, whole), whole)
            # The last token of a chunk is computed, and no more of what is spliced.
            cut = found.cut(end, page_size=8, whole=whole)
            assert found.clip(cut, whole).num_computed <= max(end, 8) + 1
    assert held > 50


@pytest.mark.parametrize(
    ("old", "new", "serves"),
    [
        (image(1, 20), image(2, 20), False),
        (image(1, 300), image(2, 500), False),
        (image(1, 300), image(2, 20), False),
        (image(1, 300), text(7, 3), True),
        (text(7, 3), image(1, 300), True),
    ],
    ids=["another image", "another large one", "a smaller one", "a few words", "an image in the place of words"],
)
def test_behind_another_image_in_its_place(old: Tokens, new: Tokens, serves: bool) -> None:
    """It is a changed field of any size, and no word names it: all behind it is computed."""
    lexicon = Lexicon(f" w{number}x" for number in range(50_000))
    index = ContentIndex(POLICY, lexicon=lexicon)
    parts = text(1, 100), text(2, 40), image(5, 30), text(3, 400)
    donor = join(parts[0], old, *parts[1:])
    publish_rows(index, "a", donor, [(0, len(donor))])
    prompt = join(parts[0], new, *parts[1:])
    found = plan_of(index, prompt, prefix_len=100, options=PlanOptions(policy=POLICY), whole=places(prompt))
    assert bool(found.runs) is serves
    if not serves:
        assert found.changed_fields == ((100, 100 + len(new)),)
        assert found.num_guarded > 300
