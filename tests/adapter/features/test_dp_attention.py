"""DP attention: what a rank tells the others before a pass, and that nothing changes it afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.runtime_context
import sglang.srt.utils.common
import torch
from sglang.srt.model_executor import cuda_graph_config

from sglang_pic.adapter.features import dp_attention
from sglang_pic.adapter.probe import gathered
from sglang_pic.adapter.serve import forward
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.faults import Faults
from sglang_pic.adapter.serve.gap_batch import GapBatch
from sglang_pic.errors import ContractError
from tests.helpers.builders import hooks_of, make_path, request, scheduled, splice

WHOLE = 40
"""Tokens of a request's extend, of which 10 are spliced."""


class Rank:
    """A rank with a pool of numbers, and what it tells the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = torch.arange(200)
        splicer = SimpleNamespace(splice=self._splice, view=SimpleNamespace(kind=None))
        self.path = make_path(splicer, recover=self._recover)
        self.faults = Faults(shares_passes=True)
        self.fails, self.told, self.recovered = False, list[int](), list[tuple[Fallback, bool]]()
        with monkeypatch.context() as patch:
            hooks = hooks_of(patch, dp_attention)
            patch.setattr(dp_attention, "gathers", lambda: True)
            dp_attention.make(None, SimpleNamespace(path=self.path))  # type: ignore[arg-type]
        self.tell, self.vote = hooks.values()
        table = SimpleNamespace(req_to_token=torch.arange(200).reshape(2, 100))
        self.runner: Any = SimpleNamespace(req_to_token_pool=table, prefill_cuda_graph_runner=None)
        self.judged: list[tuple[int, list[int]]] = []

    def _splice(self, src: torch.Tensor, dst: torch.Tensor, shifts: torch.Tensor, _: None) -> None:
        if self.fails:
            raise RuntimeError("no memory")
        self.rows[dst] = self.rows[src] + shifts

    def _recover(self, reqs: Any, reason: Fallback, error: Exception, *, is_admitted: bool, in_pass: bool) -> None:
        assert is_admitted
        self.recovered.append((reason, in_pass))
        self.faults.note(reason, error, in_pass=in_pass)

    def _judge(self, *, local_batch: Any) -> bool:
        if local_batch is not None:
            self.judged.append((local_batch.batch_size(), local_batch.prefix_lens))
        return True

    def batch(self, *, plans: bool) -> Any:
        """A batch of two requests, the first of them with a plan."""
        reqs = [request(kv=SimpleNamespace(req_pool_idx=number)) for number in range(2)]
        if plans:
            reqs[0].pic.pending = splice(0, WHOLE, (10, 20, 5), slots=140)
        return scheduled(reqs, [WHOLE, WHOLE])

    def sync(self, batch: Any) -> Any:
        """What SGLang does before a pass."""
        adapter = SimpleNamespace(enable_overlap=False, model_runner=self.runner)

        def original(_: Any, local: Any) -> Any:
            self.told.append(0 if local is None else local.extend_num_tokens)
            self.votes = self.vote(self._judge, local_batch=local)
            return local

        assert self.tell(original, adapter, batch) is batch


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_a_rank_tells_what_it_computes(rank: Rank) -> None:
    batch = rank.batch(plans=True)
    rank.sync(batch)
    assert (rank.told, rank.votes) == ([2 * WHOLE - 10], False)
    assert batch.extend_num_tokens == 2 * WHOLE, "SGLang goes on with the whole batch"
    assert rank.rows[10:20].tolist() == [row + 5 for row in range(150, 160)], "the rows are moved by then"
    rank.path._prepare(made := SimpleNamespace(), object, batch, rank.runner)  # type: ignore[arg-type]
    planned = getattr(made, forward._ATTRIBUTE)
    assert planned.is_ahead
    assert sum(planned.gap.computed_lens) == rank.told[0]
    assert rank.path.ahead(batch) is None


@pytest.mark.parametrize("replays", [False, True])
def test_a_rank_votes_with_what_its_narrowed_batch_can_replay(
    rank: Rank, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks keep their graphs, and this one replays its own then: a vote binds all."""
    monkeypatch.setattr(forward, "replays_gaps", lambda _, n, **__: replays and n == 3)
    batch = rank.batch(plans=True)
    rank.sync(batch)
    assert (rank.votes, rank.judged) == (replays, [(3, [0, 20, 0])] if replays else [])
    assert (batch.batch_size(), batch.prefix_lens) == (2, [0, 0]), "SGLang goes on with the whole batch"
    rank.path._prepare(made := SimpleNamespace(mm_inputs=None), object, batch, rank.runner)  # type: ignore[arg-type]
    monkeypatch.setattr(GapBatch, "narrowed", lambda *_: nullcontext())
    seen: list[object] = []
    rank.runner.prefill_cuda_graph_runner, rank.runner.attn_backend = "captured", None
    rank.path._forward(lambda runner, _: seen.append(runner.prefill_cuda_graph_runner), rank.runner, made)  # type: ignore[arg-type]
    assert seen == ["captured" if replays else None]


@pytest.mark.parametrize("stage", ["lay_out", "splice"])
def test_what_fails_before_is_told_as_a_whole_batch(rank: Rank, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rank.batch(plans=True)
    closed: list[str] = []
    batch.reqs[0].pic.pending.locks.callback(closed.append, "unlocked")
    if stage == "lay_out":
        monkeypatch.setattr(forward, "build_gap_batch", lambda *_: 1 / 0)
    rank.fails = True
    rank.sync(batch)
    assert (rank.told, rank.votes, closed) == ([2 * WHOLE], True, ["unlocked"])
    assert rank.recovered == [(Fallback.FAULT_GAPS if stage == "lay_out" else Fallback.FAULT_SPLICE, False)]
    rank.path._prepare(made := SimpleNamespace(), object, batch, rank.runner)  # type: ignore[arg-type]
    assert not hasattr(made, forward._ATTRIBUTE), "the pass has as many tokens as were told"


def test_another_batch_than_the_one_that_was_told_ends_the_server(rank: Rank) -> None:
    rank.sync(rank.batch(plans=True))
    with pytest.raises(ContractError, match="another batch"):
        rank.path._prepare(SimpleNamespace(), object, rank.batch(plans=False), rank.runner)  # type: ignore[arg-type]


def test_what_fails_afterwards_ends_the_server(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole pass would have other tokens than the ranks wait for."""
    batch = rank.batch(plans=True)
    rank.sync(batch)
    rank.path._prepare(made := SimpleNamespace(mm_inputs=None), object, batch, rank.runner)  # type: ignore[arg-type]
    monkeypatch.setattr(rank.path, "splicer", SimpleNamespace(view=SimpleNamespace(kind=None)))
    monkeypatch.setattr(GapBatch, "narrowed", lambda *_: 1 / 0)
    rank.runner.prefill_cuda_graph_runner = rank.runner.attn_backend = None
    passes: list[object] = []
    with pytest.raises(ZeroDivisionError):
        rank.path._forward(lambda *_: passes.append("computed"), rank.runner, made)  # type: ignore[arg-type]
    assert passes == []
    assert rank.recovered == [(Fallback.FAULT_GAPS, True)]


@pytest.mark.parametrize(("num_ranks", "graphs"), [(1, "breakable"), (2, "full"), (2, "disabled")])
def test_a_pass_without_a_request_is_the_same_on_all_ranks(
    num_ranks: int, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph_config, "check_cuda_graph_backend", lambda _, backend: backend == graphs)
    parallel = SimpleNamespace(num_dp_ranks=num_ranks)
    monkeypatch.setattr(gathered, "gathers", lambda: True)
    monkeypatch.setattr(sglang.srt.runtime_context, "get_parallel", lambda: parallel)
    monkeypatch.setattr(sglang.srt.utils.common, "require_mlp_tp_gather", lambda: num_ranks > 1)
    batch: Any = SimpleNamespace(input_ids=torch.zeros(7), batch_size=3)
    gathered.set_token_counts(batch, 7)
    assert batch.global_num_tokens_cpu == batch.global_num_tokens_gpu.tolist() == [7] * num_ranks
    assert batch.global_num_tokens_for_logprob_cpu == [3] * num_ranks
    assert batch.is_extend_in_batch
    assert batch.can_run_dp_prefill_cuda_graph == (graphs != "disabled"), "what a pass of the server would be told"
