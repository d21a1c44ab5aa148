"""A draft model beside a model: what is spliced and computed of both, over a stand-in that computes real attention."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.startup import draft_workers
from sglang_pic.adapter.startup.drafts import DraftBench, named, read_drafts
from sglang_pic.adapter.startup.row_check import check_rows
from sglang_pic.errors import ContractError, UnsupportedError
from tests.helpers.builders import fail
from tests.helpers.draft_pair import DONOR_POSITION, DraftRunner, Pair, half

pytestmark = pytest.mark.usefixtures("no_groups")

KINDS = {
    "eagle": {"reads_hidden_states": True},
    "standalone": {"reads_hidden_states": False},
    "heads": {"reads_hidden_states": True, "num_heads": 3},
    "media": {"reads_hidden_states": True, "has_media": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_rows_of_target_and_draft_are_those_of_a_full_prefill(kind: str) -> None:
    """At a gap's end the draft reads the next token of the prompt, which is a run's, and the gap's hidden state."""
    pair = Pair(**KINDS[kind])  # type: ignore[arg-type]
    assert max(pair.spliced()) < 2e-2, "as far off as bfloat16 rounds"
    assert pair.heads[0].positions == [DONOR_POSITION, 0, 0]
    assert pair.noted == []


@kinds
@pytest.mark.parametrize("stage", [Fallback.FAULT_SPLICE, Fallback.FAULT_GAPS])
def test_a_fault_before_the_drafts_pass_computes_both_whole(
    kind: str, stage: Fallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the splice of the draft's rows, or in the target's pass."""
    pair = Pair(**KINDS[kind])  # type: ignore[arg-type]

    def arm() -> None:
        if stage is Fallback.FAULT_SPLICE:
            monkeypatch.setattr(pair.path.drafts.splicers[-1], "splice", fail)
        else:
            monkeypatch.setattr(pair.target, "compute", half(pair.target.compute))

    assert pair.spliced(arm) == [0, 0, 0, 0]
    assert [(note[1], note[3]) for note in pair.noted] == [(stage, True)]


@kinds
def test_a_fault_in_the_drafts_pass_costs_what_the_draft_knows_of_the_runs_at_most(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has computed its gaps: there are hidden states of these alone; heads behind it compute all, too."""
    pair = Pair(**KINDS[kind])  # type: ignore[arg-type]
    target_gaps, target_runs, _, draft_runs = pair.spliced(
        lambda: monkeypatch.setattr(pair.heads[0], "compute", half(pair.heads[0].compute))
    )
    assert max(target_gaps, target_runs) < 2e-2
    assert (draft_runs < 2e-2) == (kind == "standalone")
    # What was spliced of the target was, and stays counted.
    assert [(note[1], note[3]) for note in pair.noted] == [(Fallback.FAULT_GAPS, False)]
    assert pair.path._running is None


@pytest.mark.parametrize("reads_hidden_states", [True, False], ids=["eagle", "standalone"])
def test_start_up_checks_the_rows_of_the_draft(reads_hidden_states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = DraftRunner(reads_hidden_states=reads_hidden_states)
    before = [buffer.clone() for buffer in runner.buffers]

    def given(tokens: torch.Tensor) -> Any:
        return SimpleNamespace(hidden_states=runner.embedding[tokens % 97].flatten(1) if reads_hidden_states else None)

    def check() -> tuple[float, float]:
        rows, gaps = check_rows(runner, runner.splicer(), 48, None, make=partial(DraftBench, spec_info=given))  # type: ignore[arg-type]
        return rows.keys, gaps.unread

    keys, unread = check()
    assert (keys < 5e-2, unread < 0.1) == (True, True)
    assert all(map(torch.equal, runner.buffers, before))
    runner.reads_prefix = False
    with pytest.raises(UnsupportedError, match="tokens after a splice do not read its rows"):
        check()


def context(algorithm: str) -> Any:
    runner = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm[algorithm])
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), tp_rank=0, model_config=None)


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_a_server_without_a_draft_model_has_none(algorithm: str) -> None:
    assert read_drafts(context(algorithm), None) == []  # type: ignore[arg-type]


def test_a_draft_that_prefills_in_another_way_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherWorker(EagleDraftWorker):
        def __init__(self) -> None:
            pass

        def _draft_extend_for_prefill(self, *args: object, **kwargs: object) -> None:
            """Another way."""

    ctx = context("EAGLE")
    monkeypatch.setattr(draft_workers, "_workers", [])
    with pytest.raises(ContractError, match=r"^--speculative-algorithm EAGLE: SGLang has the draft workers \[\]; "):
        read_drafts(ctx, None)  # type: ignore[arg-type]
    draft_workers._note(None, SimpleNamespace(target_worker=ctx.tp_worker, draft_worker=OtherWorker()))
    draft_workers._note(None, SimpleNamespace(target_worker=None, draft_worker=object()))
    with pytest.raises(ContractError, match=r"\['OtherWorker'\]; .*start without --speculative-algorithm"):
        read_drafts(ctx, None)  # type: ignore[arg-type]


def test_a_draft_whose_rows_cannot_be_moved_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, worker = context("STANDALONE"), EagleDraftWorker.__new__(EagleDraftWorker)

    def refuses(match: str, target: Any = None) -> None:
        with pytest.raises(UnsupportedError, match=match):
            read_drafts(ctx, target)

    pool = type("NoOpMHATokenToKVPool", (), {})()
    fields = {"spec_algorithm": SpeculativeAlgorithm.STANDALONE, "model": torch.nn.Identity(), "token_to_kv_pool": pool}
    fields["req_to_token_pool"] = SimpleNamespace(size=64)
    worker.draft_runner = SimpleNamespace(**fields, prefill_attention_backend_str="pic_cpu")
    monkeypatch.setattr(draft_workers, "_workers", [SimpleNamespace(target_worker=ctx.tp_worker, draft_worker=worker)])
    refuses(
        r"^the draft model of --speculative-algorithm STANDALONE \(Identity\): .*KV pool NoOp.*: it keeps no "
        r"rows; .* pic; else choose another draft, or start without --speculative-algorithm\.$"
    )
    plain = type("MHATokenToKVPool", (), {"dtype": torch.float8_e5m2})()
    worker.draft_runner.token_to_kv_pool = plain
    refuses(r"; start with --speculative-draft-kv-cache-dtype auto or fp8_e4m3; ")
    target = SimpleNamespace(view=SimpleNamespace(num_slots=7, windows=SimpleNamespace(slots=torch.zeros(8))))
    ctx.model_config = SimpleNamespace(context_len=8)
    with monkeypatch.context() as patch:
        for name, made in (
            ("view_pool", None),
            ("read_geometry", None),
            ("Splicer", SimpleNamespace(view=SimpleNamespace(num_slots=5))),
        ):
            patch.setattr(f"sglang_pic.adapter.startup.drafts.{name}", lambda *_, made=made, **__: made)
        refuses("a KV pool of 5 slots beside the target's 7: both must have as many,", target)
        windows = SimpleNamespace(slots=torch.zeros(8))
        moved = SimpleNamespace(view=SimpleNamespace(num_slots=7, windows=windows))
        patch.setattr("sglang_pic.adapter.startup.drafts.Splicer", lambda *_: moved)
        refuses("window slots that are not the target's: both must have the same;", target)
        target.view.windows = windows
        assert [draft.splicer for draft in read_drafts(ctx, target)] == [moved]
    worker.draft_runner.prefill_attention_backend_str = "trtllm_mla"
    refuses("start with --speculative-draft-attention-backend flashinfer")
    worker.draft_runner.prefill_attention_backend_str = "unheard_of"
    refuses(r", trtllm_mha with --speculative-draft-attention-backend; else")
    with pytest.raises(ValueError, match=r"^not ours$"), named(worker.draft_runner):
        raise ValueError("not ours")
