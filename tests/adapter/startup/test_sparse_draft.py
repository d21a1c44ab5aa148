"""A draft with an indexer beside a model with one (DeepSeek-V3.2 and its MTP layer): both have index keys of their own.

SGLang's own draft worker over a live model with random weights, without a server. Its target's part is tested in
`test_sparse_index.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch
from pic_platform import speculation

from sglang_pic.adapter.probe.borrowed_slots import borrow_slots
from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_forward
from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import GapBatch, build_gap_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.adapter.startup.drafts import Draft, DraftBench
from sglang_pic.adapter.startup.row_check import check_rows
from sglang_pic.runtime import read_geometry, view_pool
from sglang_pic.runtime.splice import Splicer
from tests.helpers.builders import plan
from tests.helpers.live_rows import NUM_TOKENS, RUNS, SHIFT, Chosen, overlaps, recorded, ways_of
from tests.helpers.processes import on_live_model, spliced_path

pytestmark = pytest.mark.feature("a draft model with a sparse-attention indexer")

FOLLOWING: Final = 7
_CHAIN: Final = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


class Pair:
    """The live model and the draft that SGLang makes for it, over the same slots."""

    def __init__(self, runner: Any) -> None:
        from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

        speculation.install()
        target = SimpleNamespace(model_runner=runner, random_seed=1, model_config=runner.model_config)
        worker: Any = EagleDraftWorker(runner.server_args, 0, 0, target)
        worker.alloc_memory_pool(runner.memory_pool_config, runner.req_to_token_pool, runner.token_to_kv_pool_allocator)
        worker.init_attention_backends()
        worker.init_cuda_graphs()
        self.target, self.path, self.worker = runner, spliced_path(runner), worker
        view = view_pool(worker.draft_runner.token_to_kv_pool)
        geometry = read_geometry(worker.draft_runner.model, max_shift=8_192)
        self.draft = Draft(worker, worker.draft_runner, Splicer(view, geometry))
        self.path.drafts.splicers = [self.draft.splicer]
        self.row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
        draw = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1_000, 40_000, (NUM_TOKENS,), generator=draw)

    def prefill(self, slots: torch.Tensor, position: int, gap: GapBatch | None = None) -> tuple[torch.Tensor, Chosen]:
        """The draft's log-probabilities behind the last token, and what it chose, after the target's pass.

        The last row of what it chose is what SGLang is handed for the steps that follow.
        """
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        self.row[:NUM_TOKENS] = slots.to(self.row.dtype)
        following = torch.tensor([FOLLOWING])
        batch = self._batch(self.target, self.tokens, slots, position)
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        if gap is not None:
            attach_gap_batch(batch, gap)
        states = trial_forward(self.target, batch).logits_output.hidden_states
        batch = self._batch(self.draft.runner, torch.cat((self.tokens[1:], following)), slots, position)
        batch.capture_hidden_mode = CaptureHiddenMode.LAST
        batch.spec_info = self.draft.spec_info(self.tokens[:1])
        batch.spec_info.hidden_states = states
        # As `EagleDraftWorker._draft_extend_for_prefill` does for drafts whose steps share what they chose.
        seed = batch.spec_info.dsa_seed_topk_capture = self.worker._get_dsa_extend_topk_buf(1)
        batch.spec_info.dsa_seed_topk_select = (batch.extend_seq_lens.cumsum(0) - 1).long()
        if gap is not None:
            attach_gap_batch(batch, gap, of_draft=True)
        with self.draft.serving(), recorded() as chosen:
            (logits,) = trial_forward(self.draft.runner, batch).logits_output.next_token_logits
        assert set(seed[0].tolist()) - {-1} == chosen.layers[0][-1], "what is handed on was chosen for the last token"
        return logits.double().log_softmax(0), chosen

    def _batch(self, runner: Any, tokens: torch.Tensor, slots: torch.Tensor, position: int) -> Any:
        return trial_batch(runner, [NUM_TOKENS], first_position=position, input_ids=tokens, slots=slots)


def run_cases(runner: Any, _: object) -> dict[str, Any]:
    """Start-up's check of the draft, and its rows, choices and guesses of splices beside those of full prefills."""
    pair = Pair(runner)
    splicer, view = pair.draft.splicer, pair.draft.splicer.view
    with pair.draft.serving():
        make = partial(DraftBench, spec_info=pair.draft.spec_info)
        errors, gaps = check_rows(pair.draft.runner, splicer, 64, None, make=make)
    found: dict[str, Any] = {"start-up": dataclasses.asdict(errors) | gaps._asdict(), "layers": len(view.index)}
    with borrow_slots(view, 3, NUM_TOKENS, pair.row) as (here, there, written), torch.no_grad():
        other, elsewhere = pair.prefill(there, SHIFT)
        full, right = pair.prefill(here, 0)
        found["elsewhere"] = {"overlap": overlaps(elsewhere, right)[0], "kl": divergence(full, other)}
        for name, shift, moves in ways_of(splicer):
            pair.path.drafts.splicers = [moves]
            for each in (view, pair.path.splicer.view):
                each.fill(written, 0xFF)
            source = there if shift else here
            planned = plan(0, NUM_TOKENS, *((a, b, -shift) for a, b in RUNS))
            pending = PendingSplice.on_device(planned, [source[a:b] for a, b in RUNS])
            pair.row[:NUM_TOKENS] = written.to(pair.row.dtype)
            gap = build_gap_batch([pending], [0], [NUM_TOKENS], [NUM_TOKENS], [pair.row], view.device)
            spliced, chosen = pair.prefill(written, 0, gap)
            found[name] = {"kl": divergence(full, spliced), "overlap": overlaps(chosen, right)[0]}
    return found


def divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    return float((full.exp() * (full - other)).sum())


@pytest.fixture(scope="module")
def found(model_dir: Callable[[str], Path]) -> dict[str, Any]:
    server = {"dtype": "float32", "max_running_requests": 4, "speculative_algorithm": "NEXTN", **_CHAIN}
    return cast(dict[str, Any], on_live_model(run_cases, model_dir("tiny-dsa-mtp"), **server))


def test_start_up_checks_the_index_keys_of_the_draft(found: dict[str, Any]) -> None:
    assert found["layers"] == 1
    assert 0 < found["start-up"]["index_keys"] < 0.1
    assert found["start-up"]["unread"] < 0.1


def test_a_splice_at_shift_zero_leaves_the_draft_as_it_is(found: dict[str, Any]) -> None:
    """It chooses the tokens of a full prefill, hands on those of the prompt's last token, and guesses as before."""
    assert found["here"]["overlap"] == 1
    assert abs(found["here"]["kl"]) <= 1e-5


def test_a_drafts_index_keys_turn_as_its_targets_do(found: dict[str, Any]) -> None:
    """Its choices are as near to a full prefill's as those of one elsewhere; the control has keys that did not turn."""
    assert found["moved"]["overlap"] > found["elsewhere"]["overlap"] - 0.05
    assert found["moved"]["overlap"] > 0.95
    assert found["unturned"]["overlap"] < 0.8
    assert found["unturned"]["kl"] > 1.3 * found["moved"]["kl"]
