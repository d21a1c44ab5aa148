"""Images in prompts: which are told apart, and runs that hold them on a live tiny Qwen2.5-VL.

An image advances positions by less than its tokens, so a run behind other images moves by other numbers of tokens and
of positions.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from pic_kernels.numerics import relative_l2
from pic_models import vision
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.mm_utils import pad_mm_tokens
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

from sglang_pic.adapter.features.images import Images
from sglang_pic.adapter.probe.borrowed_slots import borrow_slots
from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_forward
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.state import Judged, PendingSplice, tokens_of
from sglang_pic.core import MEDIA_FROM, MOST_REUSE, ContentIndex, Plan, PlanOptions, RowSource, Run
from sglang_pic.core import Path as TokenPath
from sglang_pic.runtime.checks.gap_rows import read_rows
from sglang_pic.runtime.views import PoolView
from tests.helpers.builders import make_stations, request
from tests.helpers.core_builders import publish_rows
from tests.helpers.processes import on_live_model, spliced_path

START, END, PAD, VIDEO = (vision.TOKEN_IDS[f"{name}_id"] for name in vision.TOKEN_NAMES)


class Image(NamedTuple):
    """An image of `height` x `width` tokens; equal seeds are equal pixels."""

    seed: int
    height: int
    width: int


Part = Image | tuple[int, int]
"""Of a prompt: an image, or `(seed, tokens)` of text."""


def prompt(*parts: Part, **changes: Any) -> Any:
    """A request whose prompt is made of these, as SGLang hands it to admission."""
    ids: list[int] = []
    items: list[MultimodalDataItem] = []
    for part in parts:
        if not isinstance(part, Image):
            ids += random.Random(part[0]).choices(range(1_000, 40_000), k=part[1])
            continue
        ids += [START, *[PAD] * part.height * part.width, END]
        grid = torch.tensor([[1, 2 * part.height, 2 * part.width]])
        draw = torch.Generator().manual_seed(part.seed)
        pixels = torch.rand(int(grid.prod()), 1_176, generator=draw)
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=pixels, model_specific_data={"image_grid_thw": grid})
        item.offsets = [(len(ids) - 1 - part.height * part.width, len(ids) - 2)]
        item.set_pad_value()
        items.append(item)
    grids = torch.cat([item.image_grid_thw for item in items]) if items else None
    positions, delta = MRotaryEmbedding.get_rope_index(
        2, PAD, VIDEO, START, "qwen2_5_vl", 2, input_ids=torch.tensor([ids]), image_grid_thw=grids
    )
    inputs = MultimodalInputs(items, im_token_id=PAD, mrope_positions=positions[:, 0], mrope_position_delta=delta)
    for name, value in changes.items():
        setattr(inputs if hasattr(inputs, name) else items[0], name, value)
    padded = pad_mm_tokens(array("q", ids), inputs)
    return request(padded, multimodal_inputs=inputs if items else None)


A, B = Image(1, 3, 4), Image(2, 5, 2)
TALL: Final = Image(1, 4, 3)


def read(images: Images, req: Any) -> np.ndarray:
    """The core's tokens of a request."""
    req.pic.judged = Judged(media=images.read(req) if req.multimodal_inputs is not None else None)
    return tokens_of(req)


def test_equal_core_tokens_are_equal_images() -> None:
    """Each place has a token of its own, so that nothing matches in the middle; SGLang's ids come back."""
    images = Images(is_mrope=True)
    both, swapped = prompt((7, 5), A, (8, 3), B, (9, 4)), prompt((7, 5), B, (8, 3), A)
    one, two = read(images, both), read(images, swapped)
    spans = both.pic.media.spans
    assert [list(both.full_untruncated_fill_ids[a - 1 : b + 1])[:: b - a + 1] for a, b in spans] == [[START, END]] * 2
    first, second = (one[slice(*span)] for span in spans)
    assert len({*first, *second}) == 12 + 10
    assert min(*first, *second) >= MEDIA_FROM
    (b_first, b_end), (a_first, a_end) = swapped.pic.media.spans
    assert (two[a_first:a_end].tolist(), two[b_first:b_end].tolist()) == (first.tolist(), second.tolist())
    for req, tokens in ((both, one), (swapped, two)):
        assert images.ids(tokens) == req.full_untruncated_fill_ids
        # A path may end inside an image.
        assert images.ids(tokens[: req.pic.media.spans[0][0] + 3]) == req.full_untruncated_fill_ids[:9]
    # The lag of what is behind both: 12 tokens are 4 positions, and 10 are 5.
    assert [images.lags(one).at(place) for place in (5, *spans[0], len(one))] == [0, 0, 8, 13]
    plain = Images(is_mrope=False)
    assert plain.lags(read(plain, prompt((7, 5), A, (8, 3), mrope_positions=None))).at(18) == 0


def test_two_images_that_sglang_takes_for_one_are_moved_no_more() -> None:
    """Pixels of one colour give one hash at each shape: neither of the two may have the other's rows."""
    images = Images(is_mrope=True)
    wide, tall = (prompt((7, 5), image, (8, 3)) for image in (A, TALL))
    tall.multimodal_inputs.mm_items[0].set_hash(wide.multimodal_inputs.mm_items[0].hash)
    tall.full_untruncated_fill_ids = wide.full_untruncated_fill_ids
    tokens = read(images, wide)
    assert images.ids(tokens) == wide.full_untruncated_fill_ids
    assert images.read(tall) is None
    assert images.read(wide) is None
    assert images.ids(tokens) == wide.full_untruncated_fill_ids[:6], "its donors are not found again"


def test_a_prompt_keeps_its_lags_when_its_image_is_forgotten() -> None:
    """While it waits, another request may bring an image that SGLang takes for its own."""
    images = Images(is_mrope=True)
    waiting, other = (prompt((7, 5), image, (8, 300)) for image in (A, TALL))
    other.multimodal_inputs.mm_items[0].set_hash(waiting.multimodal_inputs.mm_items[0].hash)
    other.full_untruncated_fill_ids = waiting.full_untruncated_fill_ids
    read(images, waiting)
    text = TokenPath("text", [read(images, prompt((4, 64), (8, 300)))])
    run = Run(target_start=60, target_end=200, donor_start=105, donor=text, seam_len=0)
    turned = images.shifts([run], waiting.pic.media)
    assert turned == [60 - 105 - 8], "twelve tokens of the image are four positions"
    assert images.read(other) is None
    assert images.shifts([run], waiting.pic.media) == turned


def _stretched(req: Any) -> Any:
    req.multimodal_inputs.mrope_positions[:, -3:] += 1
    return req


def _repeating(req: Any) -> Any:
    req.full_untruncated_fill_ids[9] += 1
    return req


@pytest.mark.feature("requests with media that cannot be moved")
@pytest.mark.parametrize(
    "req",
    [
        pytest.param(lambda: prompt((7, 5), A, modality=Modality.VIDEO), id="a video"),
        pytest.param(lambda: prompt((7, 5), A, offsets=[(6, 8), (9, 17)]), id="an image in two parts"),
        pytest.param(lambda: prompt((7, 5), A, offsets=[(6, 30)]), id="an image that was cut off"),
        pytest.param(lambda: prompt((7, 5), A, mrope_positions=None), id="no positions"),
        pytest.param(lambda: _stretched(prompt((7, 5), A, (8, 9))), id="positions of another kind"),
        pytest.param(lambda: _repeating(prompt((7, 5), A)), id="values of another kind"),
    ],
)
def test_media_that_cannot_be_moved_are_computed(req: Callable[[], Any]) -> None:
    """It stays so when SGLang has let go of them, which it does before the answer's rows are published."""
    eligibility, made = make_stations(media=Images(is_mrope=True)).eligibility, req()
    assert eligibility.refusal(made) is Fallback.MEDIA
    made.multimodal_inputs = None
    assert eligibility.refusal(made) is Fallback.MEDIA
    assert eligibility.refusal(prompt((7, 300))) is None


BODY: Final[tuple[Part, ...]] = ((11, 60), A, (12, 70), B, (13, 50))
FIRST: Final[tuple[Part, ...]] = ((3, 40), *BODY)
BEHIND: Final[tuple[Part, ...]] = ((4, 30), Image(5, 6, 7), (5, 90), *BODY)
CASES: Final[dict[str, tuple[tuple[Part, ...], tuple[Part, ...], int]]] = {
    "the same prompt": (BODY, BODY, 2),
    "the same prompt elsewhere": (BODY, BODY, 2),
    "another image in its place": (FIRST, (*FIRST[:4], Image(6, 5, 2), BODY[4]), 1),
    "behind another image": (FIRST, BEHIND, 2),
    "to the front": (BEHIND, FIRST, 2),
    "text alone": (FIRST, ((4, 50), BODY[2], BODY[4]), 0),
}
"""What was computed, what is asked for, and how many images of it are in runs."""
ELSEWHERE: Final = 700
"""Positions by which everything of the second case was computed farther on, so that no context differs."""


class Bench:
    """A live model and three sets of slots: a donor's rows, those of a full prefill, and those of splices."""

    def __init__(self, runner: Any, view: PoolView, slots: Sequence[torch.Tensor]) -> None:
        self.runner, self.view = runner, view
        self.donor, self.full, self.written = slots
        self.row = runner.req_to_token_pool.req_to_token[PADDING_ROW]

    def batch(self, req: Any, slots: torch.Tensor, further: int = 0) -> Any:
        """All of a prompt, as SGLang would make it, `further` positions on."""
        ids = torch.tensor(req.full_untruncated_fill_ids)
        self.row[: len(ids)] = slots[: len(ids)].to(self.row.dtype)
        batch = trial_batch(self.runner, [len(ids)], input_ids=ids, slots=slots[: len(ids)])
        inputs = req.multimodal_inputs
        if inputs is not None:
            batch.mrope_positions = inputs.mrope_positions + further
            batch.mm_inputs = [inputs]
        return batch

    def forward(self, batch: Any) -> torch.Tensor:
        (logits,) = trial_forward(self.runner, batch).logits_output.next_token_logits
        return logits.double().log_softmax(0)

    def spliced(self, req: Any, plan: Plan, shifts: list[int]) -> torch.Tensor:
        self.view.fill(self.written, 0xFF)
        pending = PendingSplice.on_device(plan, [self.donor[run.donor_start : run.donor_end] for run in plan.runs])
        pieces, num_tokens = zip(pending.pieces, shifts, strict=True), plan.end
        pending.pieces = [piece._replace(shift=shift) for piece, shift in pieces]
        batch = self.batch(req, self.written)
        attach_gap_batch(
            batch, build_gap_batch([pending], [0], [num_tokens], [num_tokens], [self.row], self.view.device)
        )
        return self.forward(batch)

    def measure(self, donor: Any, req: Any, further: int) -> dict[str, Any]:
        """The plan, and for each way to turn its runs KL(full || spliced) and how far rows of runs are off."""
        images, index = Images(is_mrope=True), ContentIndex()
        path = read(images, donor)
        self.forward(self.batch(donor, self.donor, further))
        publish_rows(index, "here", path, [(0, len(path))])
        tokens = read(images, req)
        options, rows = PlanOptions(policy=MOST_REUSE), RowSource(whole=req.pic.whole)
        made = index.plan("here", tokens, prefix_len=0, rows=rows, options=options)
        full = self.forward(self.batch(req, self.full))
        moved = torch.cat([torch.arange(run.target_start, run.target_end) for run in made.runs])
        ways = {
            "right": [shift - further for shift in images.shifts(made.runs, req.pic.media)],
            "by tokens": [run.shift for run in made.runs],
            "not turned": [0] * len(made.runs),
        }
        found: dict[str, Any] = {"places": moved.tolist(), "images": req.pic.whole}
        for way, shifts in ways.items():
            spliced = self.spliced(req, made, shifts)
            rows = zip(read_rows(self.view, self.written), read_rows(self.view, self.full), strict=True)
            errors = [relative_l2(written[moved], computed[moved]) for written, computed in rows]
            kl = float((full.exp() * (full - spliced)).sum())
            # Keys of the first layer know no context.
            found[way] = {"kl": kl, "first_keys": errors[0], "rows": max(errors)}
        return found


def run_cases(runner: Any, _: object) -> dict[str, Any]:
    mm_schedule.init_mm_embedding_cache(1 << 24)
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    view = spliced_path(runner).splicer.view
    with borrow_slots(view, 3, 480, row) as slots, torch.no_grad():
        bench = Bench(runner, view, slots)
        return {
            name: bench.measure(prompt(*donor), prompt(*asked), ELSEWHERE if name.endswith("elsewhere") else 0)
            for name, (donor, asked, _) in CASES.items()
        }


@pytest.fixture(scope="module")
def found(model_dir: Callable[[str], Path]) -> dict[str, Any]:
    """What the cases give, in one process."""
    return on_live_model(run_cases, model_dir("tiny-qwen2.5-vl"), dtype="float32", max_running_requests=8)


@pytest.mark.feature("images in prompts", "Qwen2_5_VLForConditionalGeneration", "MRotaryEmbedding")
@pytest.mark.parametrize("case", CASES)
def test_a_run_with_images_equals_a_full_prefill(found: dict[str, Any], case: str) -> None:
    """In float32; images in gaps are embedded, and in another context the first layer's keys are what can be equal."""
    measured, right = found[case], found[case]["right"]
    places = {*measured["places"]}
    shares = [len(places & {*range(*span)}) / (span[1] - span[0]) for span in measured["images"]]
    assert {*shares} <= {0.0, 1.0}, "a run holds an image whole or not at all"
    assert sum(shares) == CASES[case][2]
    assert right["first_keys"] <= 1e-5
    if list(CASES).index(case) < 3:
        assert abs(right["kl"]) <= 1e-5
        assert right["rows"] <= 1e-3
    else:
        for control in (measured["by tokens"], measured["not turned"]):
            assert control["first_keys"] > 0.1
            assert control["kl"] > right["kl"]
