"""The start-up self-test on live models: a healthy splicer passes, wrong ones are caught by it alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pic_kernels import RopeParams

from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.startup import self_test
from sglang_pic.adapter.startup.self_test import run_self_test
from sglang_pic.config import PicConfig
from sglang_pic.core import CoreConfig
from sglang_pic.runtime import RopeGeometry
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolView
from tests.helpers.processes import on_live_model, spliced_path

MSCALE = 0.1 * torch.tensor(4.0).log().item() + 1
"""YaRN's magnitude for a context four times as long, as Qwen3 and others set it: 1.139."""


class AppliesMscale(Splicer):
    """Multiplies keys that have the magnitude already, as a table of cosines with `mscale` in it would."""

    def splice(self, src: torch.Tensor, dst: torch.Tensor, *others: torch.Tensor | None) -> None:
        super().splice(src, dst, *others)  # type: ignore[arg-type]
        view = self.view
        for keys in view.keys:
            keys[dst, :, view.rope_offset : view.rope_offset + view.rope_dim] *= MSCALE


def wrong_base(rope: RopeParams) -> RopeParams:
    """A tenth off."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return dataclasses.replace(rope, inv_freq=rope.inv_freq * 1.1**-exponents)


def wrong_layout(rope: RopeParams) -> RopeParams:
    """NeoX for interleaved, interleaved for NeoX."""
    return dataclasses.replace(rope, is_neox_style=not rope.is_neox_style)


def changed(geometry: RopeGeometry, change: Callable[[RopeParams], RopeParams]) -> RopeGeometry:
    return dataclasses.replace(geometry, params=tuple(change(rope) for rope in geometry.params))


class PageEnds:
    """Looks behind the prompt of every pass of the self-test, to the end of its last page: a kernel may read there."""

    def __init__(self, view: PoolView, table: torch.Tensor) -> None:
        self.view, self.table, self.forward = view, table, self_test.trial_logits
        self.num_read = self.num_nan = 0

    def __call__(self, runner: Any, batch: Any) -> Any:
        last, size = int(self.table[0, int(batch.seq_lens[-1]) - 1]), self.view.page_size
        behind = torch.arange(last + 1, last - last % size + size)
        self.num_read += len(behind)
        self.num_nan += int(
            sum(self.view.read(layer, behind)[0].isnan().sum() for layer in range(self.view.num_layers))
        )
        return self.forward(runner, batch)


def run_cases(runner: Any, tokenizer: Any, *, wanted: Sequence[str]) -> dict[str, Any]:
    """The self-test of each splicer that is wanted, with neither of the other start-up checks before it.

    Beside the results by name: what lay behind prompts in their last pages, and whether pool and page table were left
    as they were found.
    """
    path, default = spliced_path(runner), PicConfig()
    healthy, view, geometry = path.splicer, path.splicer.view, path.splicer.geometry
    table = runner.req_to_token_pool.req_to_token
    before = [buffer.clone() for buffer in (*view.keys, *view.values, table)]
    results: dict[str, Any] = {}
    ends = self_test.trial_logits = PageEnds(view, table)  # type: ignore[assignment]
    for name, splicer, config, words in (
        ("healthy", healthy, default, tokenizer),
        ("no tokenizer", healthy, default, None),
        ("wrong base", Splicer(view, changed(geometry, wrong_base)), default, tokenizer),
        ("wrong layout", Splicer(view, changed(geometry, wrong_layout)), default, tokenizer),
        ("mscale twice", AppliesMscale(view, geometry), default, tokenizer),
        ("tight limits", healthy, PicConfig(self_test_kl_limit=1e-9, self_test_key_limit=1e-9), tokenizer),
        ("nothing to splice", healthy, PicConfig(core=CoreConfig(sink_tokens=400)), tokenizer),
    ):
        if name in wanted:
            path.splicer = splicer
            results[name] = run_self_test(runner, splicer, config, tokenizer=words, max_gaps=32, tp_group=None)
    if "not hooked" in wanted:
        # What a server without our wrapper of the forward pass would do: the prompt is computed as it is given.
        self_test.attach_gap_batch = lambda *_: None
        results["not hooked"] = run_self_test(runner, healthy, default, tokenizer=None, max_gaps=32, tp_group=None)
        self_test.attach_gap_batch = attach_gap_batch
    if "small pool" in wanted:
        small = dataclasses.replace(view, num_slots=view.page_size + 512)
        results["small pool"] = run_self_test(
            runner, Splicer(small, geometry), default, tokenizer=tokenizer, max_gaps=32, tp_group=None
        )
    after = (*view.keys, *view.values, table)
    results["page ends"] = {"read": ends.num_read, "nan": ends.num_nan}
    results["left as found"] = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return results


# Model, dtype, page size.
_SETUPS = [("tiny-gqa", "float32", 16), ("tiny-gqa", "bfloat16", 1), ("tiny-mla", "float32", 16)]
_FAULTS = ["wrong base", "wrong layout", "mscale twice"]
_CASES = ["healthy", "no tokenizer", *_FAULTS, "not hooked", "nothing to splice", "small pool"]


def drive(model: Path, dtype: str, page_size: int, *wanted: str) -> dict[str, Any]:
    server = {"dtype": dtype, "page_size": page_size, "max_running_requests": 4}
    results: dict[str, Any] = on_live_model(partial(run_cases, wanted=wanted), model, **server)
    return results


@pytest.fixture(scope="module", params=_SETUPS, ids=lambda setup: "-".join(map(str, setup)))
def results(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> dict[str, Any]:
    name, dtype, page_size = request.param
    return drive(model_dir(name), dtype, page_size, *_CASES)


def test_a_right_splicer_is_exact_and_leaves_nothing_behind(results: dict[str, Any]) -> None:
    """Random weights take no splice from another context, so only exactness can be asked of them."""
    exact = results["no tokenizer"]
    assert exact["verdict"] == "passed", exact["reasons"]
    for case in ("healthy", "no tokenizer"):
        measured = results[case]["measured"]
        assert measured["moved"]["kl_nats"] < 0.02
        assert measured["moved"]["key_error"] < 0.03
        assert measured["naive"]["first_key_error"] > 0.5
        assert measured["reordered"]["kl_nats"] < 0.7 * measured["naive"]["kl_nats"]
        assert results[case]["is_exact"]
    assert all("reordered" in reason for reason in results["healthy"]["reasons"])
    assert results["left as found"]


@pytest.mark.parametrize(
    ("case", "verdict", "reason"),
    [
        # For what it is, not for what the model makes of another context.
        *(
            (fault, "failed", "first-layer keys of moved prompts.*Moved rows are wrong for this model")
            for fault in _FAULTS
        ),
        # It computes the whole prompt, which would be right if it were given the prompt.
        ("not hooked", "failed", ""),
        ("nothing to splice", "skipped", r"core\.sink_tokens=400 and core\.seam_tokens=64 leave nothing"),
        ("small pool", "skipped", "a KV pool of 512 tokens is too small: give --max-total-tokens "),
    ],
)
def test_a_wrong_splicer_is_caught_and_what_cannot_be_tested_is_said(
    results: dict[str, Any], case: str, verdict: str, reason: str
) -> None:
    found = results[case]
    assert found["verdict"] == verdict
    assert re.match(reason, found["reasons"][0])
    assert not found["is_exact"] if verdict == "failed" else found["measured"] is None


def test_a_trained_model_takes_splices_from_another_context(model_dir: Callable[[str], Path]) -> None:
    results = drive(model_dir("smollm2"), "bfloat16", 16, "healthy", "tight limits", "mscale twice")
    healthy = results["healthy"]
    assert healthy["verdict"] == "passed", healthy["reasons"]
    assert healthy["measured"]["reordered"]["same_top1"] == 3
    assert healthy["measured"]["naive"]["kl_nats"] > 10 * healthy["measured"]["reordered"]["kl_nats"]
    assert results["tight limits"]["verdict"] == "failed"
    assert all("reordered" in reason for reason in results["tight limits"]["reasons"])
    assert results["tight limits"]["is_exact"], "a matter of tolerance"
    # The smallest of the faults; the tiny models show the others.
    assert results["mscale twice"]["verdict"] == "failed"
    assert not results["mscale twice"]["is_exact"]
    assert results["page ends"]["read"] > 0, "prompts that end inside a page"
    assert results["page ends"]["nan"] == 0
