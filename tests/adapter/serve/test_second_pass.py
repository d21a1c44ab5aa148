"""The second pass of prompts whose text has another order: what it computes, counts and asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.probe.borrowed_slots import borrow_slots
from sglang_pic.adapter.probe.extend import PADDING_ROW
from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.second_pass import SecondPass
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.adapter.sglang.hooks import apply_hooks
from sglang_pic.adapter.startup.asking_layers import find_layers, make_second_pass
from sglang_pic.core import DropReason, Plan
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime import attended
from sglang_pic.runtime.attended import best_attended
from sglang_pic.runtime.views import PoolKind
from tests.helpers.builders import conditional, fail, plan, request_state
from tests.helpers.live_rows import NUM_TOKENS, SHIFT, Bench
from tests.helpers.processes import on_live_model, spliced_path

RUNS = (20, 90), (100, 150), (155, 200)


class Spliced(Bench):
    """Runs whose rows were computed after other tokens."""

    def compute_donor(self) -> None:
        tokens = self.tokens
        self.tokens = torch.cat([tokens[:20].flip(0) + 1, tokens[20:]])
        self.prefill(self.there, SHIFT)
        self.tokens = tokens

    def served(
        self,
        runs: tuple[tuple[int, int], ...],
        change: Callable[[Plan], Plan] = lambda each: each,
        *,
        is_trial: bool = True,
    ) -> Any:
        """The last token's log-probabilities, and the rows of the first layer's values behind the second run."""
        planned = change(plan(0, NUM_TOKENS, *((start, end, -SHIFT) for start, end in runs)))
        pending = PendingSplice.on_device(planned, [self.there[start:end] for start, end in runs])
        self.view.fill(self.written, 0xFF)
        batch = self._batch(self.tokens, self.written, 0)
        layout = build_gap_batch([pending], [0], [NUM_TOKENS], [NUM_TOKENS], [self.row], self.view.device)
        attach_gap_batch(batch, layout)
        batch.pic_pass = batch.pic_pass._replace(is_trial=is_trial)
        return self._forward(batch), self.view.keys[-1][self.written[150:]].double()


def run_cases(runner: Any, tokenizer: Any) -> dict[str, Any]:
    path = spliced_path(runner)
    view = path.splicer.view
    second = path.second = SecondPass(view, None, range(view.num_layers), Series((), None))
    second.install()
    apply_hooks()
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    with borrow_slots(view, 3, NUM_TOKENS, row) as slots, torch.no_grad():
        bench = Spliced(runner, path, slots)
        bench.compute_donor()
        without, rows_without = bench.served(RUNS[:2])
        everything, _ = bench.served(RUNS)
        own, _ = bench.served(RUNS, conditional)
        scores = second.scores()
        second.choose = lambda asking: [2]  # type: ignore[method-assign]
        last, rows_last = bench.served(RUNS, conditional)
        second.choose = lambda asking: [0]  # type: ignore[method-assign]
        first, _ = bench.served(RUNS, conditional)
        again, _ = bench.served(RUNS[:2])
        faults, computed = [], bench.served(())
        recovery: Any = SimpleNamespace(recover=lambda *given, **how: faults.append((given[1].value, how["in_pass"])))
        path._recovery = recovery
        # Of the choice, and of the second layout.
        choices: list[Any] = [fail, lambda asking: [7]]
        broken = []
        for choose in choices:
            second.choose = choose  # type: ignore[method-assign]
            broken.append(bench.served(RUNS, conditional, is_trial=False))
    live = SimpleNamespace(runner=runner, splicer=path.splicer, tokenizer=tokenizer)
    with pytest.raises(UnsupportedError) as refused:
        find_layers(live, second)  # type: ignore[arg-type]
    kl = lambda one, other: float((one.exp() * (one - other)).sum())  # noqa: E731
    return {
        "last": kl(without, last),
        "rows": float((rows_without - rows_last).abs().max()),
        "spliced": kl(without, everything),
        "first": kl(without, first),
        "own is one of them": min(kl(own, each) for each in (last, first)) < 1e-6 or int(scores.sum(0).argmax()) == 1,
        "scores": list(scores.shape),
        "one pass again": kl(without, again),
        "faults": faults,
        "broken": [kl(computed[0], logits) for logits, _ in broken],
        "broken rows": [float((computed[1] - rows).abs().max()) for _, rows in broken],
        "refused": str(refused.value),
    }


@pytest.fixture(scope="module")
def found(model_dir: Callable[[str], Path]) -> dict[str, Any]:
    server = {"dtype": "float32", "max_running_requests": 4}
    return cast(dict[str, Any], on_live_model(run_cases, model_dir("tiny-gqa"), **server))


def test_the_chosen_run_and_the_end_are_computed_as_if_the_run_had_not_been_spliced(found: dict[str, Any]) -> None:
    assert abs(found["last"]) < 1e-6
    assert found["rows"] < 1e-4
    # The controls: its rows were of another context, and another run is another choice.
    assert found["spliced"] > 1e-3
    assert found["first"] > 1e-4
    assert found["own is one of them"]
    assert found["scores"][1] == 3


def test_a_model_that_finds_nothing_is_refused(found: dict[str, Any]) -> None:
    assert "core.reordered=attend" in found["refused"]
    assert 'set core.reordered to "compute"' in found["refused"]


def test_a_pass_without_conditional_runs_is_one_pass(found: dict[str, Any]) -> None:
    assert found["one pass again"] == 0


def test_after_a_fault_between_the_passes_the_whole_prompt_is_computed(found: dict[str, Any]) -> None:
    assert found["faults"] == [("fault_gaps", True)] * 2
    assert max(found["broken"]) < 1e-9
    assert max(found["broken rows"]) < 1e-6


def test_scores_are_those_of_softmax_attention() -> None:
    draw = torch.Generator().manual_seed(1)
    queries, keys = torch.randn(5, 4, 8, generator=draw), torch.randn(30, 2, 8, generator=draw)
    logits = torch.einsum("nhd,thd->nht", queries, keys.repeat_interleave(2, 1)) * 0.3
    for place in range(5):
        logits[place, :, 26 + place :] = -torch.inf
    mean = logits.softmax(-1).mean((0, 1))
    found = best_attended(queries, keys, [(0, 7), (7, 20), (20, 25)], scaling=0.3)
    assert torch.allclose(found, torch.stack([mean[:7].max(), mean[7:20].max(), mean[20:25].max()]), atol=1e-6)


def test_the_logits_of_a_long_prompt_are_not_all_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    queries, keys = torch.randn(16, 32, 8, generator=draw), torch.randn(500, 2, 8, generator=draw)
    spans = [(0, 100), (100, 400)]
    expected, sizes = best_attended(queries, keys, spans, scaling=0.3), list[int]()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **kwargs or {})
            sizes.append(made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    monkeypatch.setattr(attended, "_MOST_LOGITS", 3 * 16 * 500)
    with Sizes():
        found = best_attended(queries, keys, spans, scaling=0.3)
    assert torch.allclose(found, expected, atol=1e-6)
    assert max(sizes) == 3 * 16 * 500


def test_the_second_layout_has_a_run_and_the_end_and_a_token_of_other_requests() -> None:
    planned = conditional(plan(10, 100, (20, 40, 3), (45, 60, 3), (66, 90, 3)))
    pending = PendingSplice.on_device(planned, [torch.arange(run.num_tokens) for run in planned.runs])
    rows = [torch.arange(200), torch.arange(200) + 200, torch.arange(200) + 400]
    gap = build_gap_batch([None, pending, None], [0, 10, 5], [30, 90, 20], [30, 80, 12], rows, torch.device("cpu"))
    (asks,) = gap.asking
    assert (asks.owner, asks.number, asks.at, asks.last) == (1, 0, 30 + planned.num_computed, (90, 100))
    assert asks.slots.tolist() == list(range(200, 300))
    second = gap.second([1])
    assert list(zip(second.owners, second.prefix_lens, second.seq_lens, strict=True)) == [
        (0, 29, 30), (1, 40, 60), (1, 90, 100), (2, 17, 25),
    ]  # fmt: skip
    assert second.start_lens == [1, 20, 0]
    assert second.kept.tolist() == [29, *range(30 + 30, 30 + 50), *range(30 + 80, 30 + 90), *range(120 + 12, 120 + 20)]


def test_a_plan_that_is_cut_computes_its_conditional_runs() -> None:
    planned = conditional(plan(0, 100, (20, 40, 3), (45, 60, 3), (66, 90, 3)))
    state = request_state(dropped={DropReason.SINK: 1})
    mixed = PendingSplice.on_device(planned, [torch.arange(run.num_tokens) for run in planned.runs])
    state.pending = mixed
    assert state.admit(0, 70, first_chunk=True) is mixed.plan
    assert (mixed.plan.runs, mixed.pieces, mixed.plan.end) == ((), [], 70)
    # They count as what they would have been without a second pass.
    assert state.last_plan.dropped == {DropReason.SINK: 1, DropReason.REORDERED: 3}


def test_what_a_second_pass_computes_is_counted_as_computed() -> None:
    state = request_state()
    state.pending = PendingSplice.on_device(
        plan(0, 100, (20, 40, 3), (45, 60, 3)), [torch.arange(20), torch.arange(15)]
    )
    state.count(state.admit(0, 100, first_chunk=True))
    assert state.counts.chunk_hit == 35
    assert state.compute_again(20) == 20
    assert state.counts.chunk_hit == 15
    # Its rows are no donors for all that, and a chunk that is undone takes the rest back.
    assert [(rows.start, rows.end) for rows in state.spliced] == [(20, 40), (45, 60)]
    assert state.undo_admission() == 15
    assert state.counts.chunk_hit == state.compute_again(20) == 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"drafts": [object()]}, "a draft model"),
        ({"view": {"kind": PoolKind.MLA}}, "latent rows"),
        ({"view": {"windows": object()}}, "sliding windows"),
        ({"layer": {"sliding_window_size": 8}}, "sliding windows"),
        ({"layer": {"use_irope": True}}, "sliding windows"),
        ({"view": {"dtype": torch.float8_e4m3fn}}, "float8"),
        ({"tokenizer": None}, "no tokenizer"),
        ({"mode": "prefill"}, "PD disaggregation"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_server_that_can_have_no_second_pass_is_refused(
    changed: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_pic.adapter.startup.asking_layers.gathers", lambda: False)
    view = {"kind": PoolKind.MHA, "windows": None, "dtype": torch.bfloat16, "start_layer": 0, "num_layers": 4}
    view |= changed.get("view", {})
    layer = RadixAttention(4, 8, 1.0, num_kv_heads=2, layer_id=0, **changed.get("layer", {}))
    live = {"drafts": [], "tokenizer": object(), "splicer": SimpleNamespace(view=SimpleNamespace(**view))} | changed
    live["runner"] = SimpleNamespace(model=torch.nn.ModuleList([layer]))
    ctx = SimpleNamespace(server_args=SimpleNamespace(disaggregation_mode=changed.get("mode", "null")))
    stations = SimpleNamespace(ranks=None)
    with pytest.raises(UnsupportedError, match=named):
        make_second_pass(ctx, SimpleNamespace(**live), stations, Series((), None))  # type: ignore[arg-type]
