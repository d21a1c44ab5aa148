"""Sparse attention with an indexer (DeepSeek-V3.2): its keys are moved with the rows, and choose the same tokens.

A live model with random weights, whose queries attend to 64 tokens of 230, and the same one with room for all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch

from sglang_pic.adapter.probe.borrowed_slots import borrow_slots
from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.prefill_path import prefill_path
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.adapter.startup.row_check import check_rows
from tests.helpers.builders import plan
from tests.helpers.live_rows import COMPUTED, NUM_TOKENS, RUNS, SHIFT, Bench, overlaps, recorded, ways_of
from tests.helpers.processes import on_live_model, spliced_path

WIDE: Final = {"index_topk": 8_192}
"""With this, indexers choose every token."""
DENSE: Final = {"architectures": ["DeepseekV3ForCausalLM"], "index_topk": None}
"""With this, the same weights are a model without indexers."""


def run_cases(runner: Any, _: object) -> dict[str, Any]:
    """Start-up's check, and the tokens chosen and the answers of splices, and of full prefills elsewhere."""
    path = spliced_path(runner)
    splicer, view = path.splicer, path.splicer.view
    errors, gaps = check_rows(runner, splicer, 64, None)
    found: dict[str, Any] = {"start-up": dataclasses.asdict(errors) | gaps._asdict()}
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    with borrow_slots(view, 3, NUM_TOKENS, row) as slots, torch.no_grad():
        bench = Bench(runner, path, slots)
        with recorded() as elsewhere:
            bench.prefill(slots[1], SHIFT)
        with recorded() as full:
            bench.prefill(slots[0], 0)
        found["elsewhere"] = {"overlaps": overlaps(elsewhere, full)}
        for name, shift, moves in ways_of(splicer):
            path.splicer = moves
            with recorded() as chosen:
                found[name] = bench.measure(RUNS, shift=shift)
            found[name]["overlaps"] = overlaps(chosen, full)
    return found | {"full": bench.full.tolist()}


def run_on_cuda(runner: Any, _: object) -> dict[str, Any]:
    """What SGLang's class for CUDA tells its kernels of a gap batch: the keys that each query may choose among."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, TopkTransformMethod

    path = spliced_path(runner)
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    with borrow_slots(path.splicer.view, 3, NUM_TOKENS, row) as slots, torch.no_grad():
        bench = Bench(runner, path, slots)
        planned = plan(0, NUM_TOKENS, *((*run, 0) for run in RUNS))
        pending = PendingSplice.on_device(planned, [slots[0][a:b] for a, b in RUNS])
        batch = trial_batch(runner, [NUM_TOKENS], input_ids=bench.tokens, slots=slots[2])
        layout = build_gap_batch([pending], [0], [NUM_TOKENS], [NUM_TOKENS], [row], row.device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
            backend = DeepseekSparseAttnBackend(runner)
        # A kernel cuts the work of choosing into blocks.
        backend._build_topk_v2_plan = lambda _: None
        # As with kernels that count keys from the first one of the batch: slots are made of what a draft hands on.
        backend.use_fused_topk, backend.get_topk_transform_method = True, lambda _=None: TopkTransformMethod.RAGGED
        row[:NUM_TOKENS] = slots[2]
        with layout.narrowed(batch, runner), prefill_path(runner, replays=False):
            backend.init_forward_metadata(batch)
        told = backend.forward_metadata
        first, last = told.indexer_k_start_end
        handed_on = backend.prepare_mtp_seed_indices(first[-1:] + torch.arange(NUM_TOKENS)[None], batch.forward_mode)
        tables = zip(told.page_table_1, told.real_page_table, layout.seq_lens, strict=True)
        return {
            "keys": (last - first).tolist(),
            "handed on": torch.equal(handed_on[0].long(), slots[2]),
            "lengths": told.dsa_seqlens_expanded.tolist(),
            "sequences": told.token_to_batch_idx.tolist(),
            "tables": all(
                torch.equal(table[:end].long(), slots[2][:end])
                and torch.equal(pages[: -(-end // 64)].long(), slots[2][:end:64] // 64)
                for table, pages, end in tables
            ),
        }


def run_dense(runner: Any, _: object) -> dict[str, Any]:
    """The answer of the same weights without indexers."""
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    path = spliced_path(runner)
    with borrow_slots(path.splicer.view, 3, NUM_TOKENS, row) as slots, torch.no_grad():
        return {"full": Bench(runner, path, slots).full.tolist()}


@pytest.fixture(scope="module")
def load(model_dir: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    def run(cases: Callable[[Any, Any], object], changes: dict[str, object], dtype: str = "float32") -> dict[str, Any]:
        server = {"dtype": dtype, "max_running_requests": 4, "json_model_override_args": json.dumps(changes)}
        return cast(dict[str, Any], on_live_model(cases, model_dir("tiny-dsa"), **server))

    return run


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def found(request: pytest.FixtureRequest, load: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return {"dtype": request.param, **load(run_cases, {}, request.param)}


@pytest.mark.feature("DeepseekV32ForCausalLM")
def test_a_splice_at_shift_zero_chooses_the_tokens_of_a_full_prefill(found: dict[str, Any]) -> None:
    """Each of them, in every layer; in bfloat16 the gaps' own rounding reaches the layers behind the first."""
    assert found["here"]["overlaps"][0] == 1
    if found["dtype"] == "float32":
        assert found["here"]["overlaps"] == [1, 1, 1, 1]
        assert abs(found["here"]["kl"]) <= 1e-5


def test_moved_index_keys_choose_the_same_tokens_as_nearly_as_computed_ones_do(found: dict[str, Any]) -> None:
    """Index keys are FP8, so a full prefill at another position chooses a few other tokens, too."""
    pairs = zip(found["moved"]["overlaps"], found["elsewhere"]["overlaps"], strict=True)
    assert all(moved > elsewhere - 0.05 for moved, elsewhere in pairs)
    assert found["moved"]["overlaps"][0] > 0.95
    # The control: rows turned, index keys not.
    assert found["unturned"]["overlaps"][0] < 0.8
    assert found["unturned"]["kl"] > 2 * found["moved"]["kl"]


def test_start_up_checks_index_keys(found: dict[str, Any]) -> None:
    assert 0 < found["start-up"]["index_keys"] < 0.1
    assert found["start-up"]["unread"] < 0.1


def test_on_cuda_a_query_of_a_gap_may_choose_among_all_tokens_before_it(load: Callable[..., dict[str, Any]]) -> None:
    """By the metadata of SGLang's own class: spliced tokens and the gaps before are among them; no kernel runs."""
    told = load(run_on_cuda, {})
    assert told["keys"] == told["lengths"] == [at + 1 for at in COMPUTED]
    assert told["sequences"] == [sum(at >= start for start, _ in RUNS) for at in COMPUTED]
    assert told["tables"]
    assert told["handed on"]


def test_an_index_of_the_whole_context_is_dense_attention(load: Callable[..., dict[str, Any]]) -> None:
    """Spliced and in full: as the same weights without an indexer."""
    wide, dense = load(run_cases, WIDE), load(run_dense, DENSE)
    full, without = (torch.tensor(each["full"]) for each in (wide, dense))
    assert (full - without).abs().max() < 1e-3
    for name in ("here", "moved", "unturned"):
        assert abs(wide[name]["kl"]) <= 1e-5
        assert wide[name]["same_token"]
