"""A draft model's batch beside the layout of its target's; the rest of its passes is in `startup/test_drafts.py`."""

from __future__ import annotations

from typing import Any

import torch

from sglang_pic.adapter.serve.draft_passes import narrowed_fields
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from tests.helpers.builders import BareRunner, extend_batch, splice


def test_a_draft_embeds_no_token_of_an_image_itself() -> None:
    """It embeds what follows each gap; where that is a run's image, SGLang's value for it is no token."""
    image, rows = 1_000_000, [torch.arange(100, 164), torch.arange(200, 264)]
    gap = build_gap_batch(
        [splice(0, 20, (6, 12, -3), (14, 16, -3)), None], [0, 10], [20, 5], [20, 5], rows, torch.device("cpu")
    )
    # As SGLang shifts them by one: the run at 6 begins with an image, and the second request has one in its middle.
    shifted = torch.arange(1, 26)
    shifted[5:11] = shifted[21:23] = image
    embeddings = torch.arange(50.0).view(25, 2)
    slots = torch.cat([rows[0][:20], rows[1][10:15]])
    batch = extend_batch(
        [20, 5], prefix_lens=[0, 10], rows=[1, 2], out_cache_loc=slots, input_ids=shifted, mm_input_embeds=embeddings
    )
    runner: Any = BareRunner(1)
    with gap.narrowed(batch, runner, narrowed_fields(gap, batch, runner)):
        kept = [*range(6), 12, 13, *range(16, 25)]
        assert torch.equal(batch.mm_input_embeds, embeddings[kept])
        assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 0, 13, 14, 17, 18, 19, 20, 21, image, image, 24, 25]
    assert (batch.input_ids is shifted, batch.mm_input_embeds is embeddings) == (True, True)
