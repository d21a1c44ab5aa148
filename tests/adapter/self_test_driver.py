"""A live model of SGLang in a process of its own, tested with healthy and with wrong splicers; no server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pic_kernels import RopeParams

from sglang_pic.adapter.serve.forward import hand_over
from sglang_pic.adapter.startup import self_test
from sglang_pic.adapter.startup.self_test import run_self_test
from sglang_pic.config import PicConfig
from sglang_pic.core import CoreConfig
from sglang_pic.runtime import RopeGeometry
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolView
from tests.adapter.processes import spliced_path

MSCALE = 0.1 * torch.tensor(4.0).log().item() + 1
"""YaRN's magnitude for a context four times as long, as Qwen3 and others set it: 1.139."""


class AppliesMscale(Splicer):
    """Multiplies keys that have the magnitude already, as a table of cosines with `mscale` in it would."""

    def splice(self, src: torch.Tensor, dst: torch.Tensor, shifts: torch.Tensor) -> None:
        super().splice(src, dst, shifts)
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
    """`geometry` with every rotation changed."""
    return dataclasses.replace(geometry, params=tuple(change(rope) for rope in geometry.params))


class PageEnds:
    """Looks behind the prompt of every pass of the self-test, to the end of its last page: a kernel may read there."""

    def __init__(self, view: PoolView, table: torch.Tensor) -> None:
        self.view, self.table, self.forward = view, table, self_test.trial_forward
        self.num_read = self.num_nan = 0

    def __call__(self, runner: Any, batch: Any) -> Any:
        last, size = int(self.table[0, int(batch.seq_lens[-1]) - 1]), self.view.page_size
        behind = torch.arange(last + 1, last - last % size + size)
        self.num_read += len(behind)
        self.num_nan += int(sum(self.view.read(keys, behind).isnan().sum() for keys in self.view.keys))
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
    ends = self_test.trial_forward = PageEnds(view, table)  # type: ignore[assignment]
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
        self_test.hand_over = lambda *_: None
        results["not hooked"] = run_self_test(runner, healthy, default, tokenizer=None, max_gaps=32, tp_group=None)
        self_test.hand_over = hand_over
    if "small pool" in wanted:
        small = dataclasses.replace(view, num_slots=view.page_size + 512)
        results["small pool"] = run_self_test(
            runner, Splicer(small, geometry), default, tokenizer=tokenizer, max_gaps=32, tp_group=None
        )
    after = (*view.keys, *view.values, table)
    results["page ends"] = {"read": ends.num_read, "nan": ends.num_nan}
    results["left as found"] = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return results
