"""Images in the core: a run holds one whole or not at all, and nothing is spliced behind a changed one by its name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from core_builders import index_of, join, plan_of, spans, text

from sglang_pic.core import MEDIA_FROM, ContentIndex, CoreConfig, Lexicon, Plan, PlanOptions, Span, Tokens, as_tokens

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
    whole, options = places(prompt), PlanOptions(policy=policy, whole=places(prompt))
    held = 0
    for at in range(overlap + 1, len(body), 3):
        # Two donors that part here, so that runs adjoin.
        index = index_of(join(text(90, 30), body[:at]), join(text(91, 47), body[at - overlap :]))
        found = plan_of(index, prompt, options=options)
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
    index.publish("a", donor, [(0, len(donor))])
    prompt = join(parts[0], new, *parts[1:])
    found = plan_of(index, prompt, prefix_len=100, options=PlanOptions(policy=POLICY, whole=places(prompt)))
    assert bool(found.runs) is serves
    if not serves:
        assert found.changed_fields == ((100, 100 + len(new)),)
        assert found.num_guarded > 300
