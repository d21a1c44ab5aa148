"""The start-up self-test on live models: a healthy splicer passes, wrong ones are caught by it alone."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pic_kernels import RopeParams

from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.startup import self_test
from sglang_pic.adapter.startup.prompts import Donor, SelfTestPrompt, built_in_prompts
from sglang_pic.adapter.startup.self_test import run_self_test
from sglang_pic.config import PicConfig, read_config
from sglang_pic.core import CoreConfig, ReusePolicy
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime import RopeGeometry, read_geometry, view_pool
from sglang_pic.runtime.checks import spliced_prompts
from sglang_pic.runtime.checks.spliced_prompts import Outcome, PromptPass, judge_prompts, measure_prompt
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolView
from tests.helpers import rope_models as models
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


def built_in_prompts_of(case: str) -> Callable[..., list[SelfTestPrompt]]:
    """All of them where they are counted; the first one shows what a fault does to each."""
    most = None if case in ("healthy", "no tokenizer") else 1
    return lambda *args, **options: built_in_prompts(*args, **options)[:most]


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
            path.splicer, self_test.built_in_prompts = splicer, built_in_prompts_of(name)
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


LIMITS = spliced_prompts.OperatorLimits(kl_nats=1.0, key_error=0.5)
GOOD = (0.001, 0.0, 0.001, 0.002)
NAIVE = (3.0, 1.0, 1.4, 1.4)


def verdict(
    moved: tuple[float, ...] = GOOD, reordered: tuple[float, ...] = GOOD, elsewhere: tuple[float, ...] = GOOD
) -> spliced_prompts.SelfTest:
    """Of two prompts that measured the same."""
    measured = torch.tensor([[moved, reordered, NAIVE, elsewhere]] * 2, dtype=torch.float64)
    return judge_prompts(measured, LIMITS, dtype=torch.bfloat16, seconds=0.5)


@pytest.mark.parametrize(
    ("moved", "reordered", "reason"),
    [
        ((0.001, 0, 0.03, 0.03), GOOD, "first-layer keys of moved prompts: relative L2 0.03, allowed is 0.02 for bf"),
        ((0.2, 0, 0.001, 0.001), GOOD, "moved prompts: KL of the first token 0.2, allowed is 0.1 for bf"),
        (GOOD, (0.001, 0, 0.03, 0.03), "first-layer keys of reordered blocks: relative L2 0.03, allowed is 0.02 for"),
        (GOOD, (0.001, 0, 0.001, 0.6), "keys of reordered blocks: relative L2 0.6, allowed is 0.5 (unrotated 1.4)"),
        (GOOD, (1.5, 1, 0.001, 0.4), "reordered blocks: KL of the first token 1.5, allowed is 1 nats (unrotated 3)"),
    ],
)
def test_each_measure_has_its_limit(moved: tuple[float, ...], reordered: tuple[float, ...], reason: str) -> None:
    result = verdict(moved, reordered)
    assert result.verdict is Outcome.FAILED
    (found,) = result.reasons
    assert found.startswith(reason)
    assert result.is_exact == ("unrotated" in reason), "the other limits are the operator's"
    assert "--radix-cache-backend pic" in found, "a line says what to do"


def test_a_deep_model_is_not_refused_for_what_it_does_between_positions() -> None:
    """Keys of deeper layers say nothing about a splice; the first token's distribution is measured against itself."""
    assert verdict(moved=(0.3, 0, 0.001, 0.6), elsewhere=(0.2, 0, 0, 0)).passed
    for moved_kl, elsewhere_kl in ((0.3, 0.05), (1.2, 0.9), (1e9, 1e9)):
        result = verdict(moved=(moved_kl, 0, 0.001, 0.6), elsewhere=(elsewhere_kl, 0, 0, 0))
        assert not result.is_exact
        assert result.reasons[0].startswith("moved prompts: KL of the first token")


@pytest.mark.parametrize("setting", ["warn", "refuse"])
def test_a_splice_that_is_not_exact_stops_the_server_whatever_the_setting(setting: str) -> None:
    pytest.importorskip("sglang")
    from sglang_pic.adapter.startup.self_test import log_result

    config = read_config(f'{{"self_test": "{setting}"}}')
    log_result(verdict(), config)
    with pytest.raises(UnsupportedError, match=r"^self-test failed: first-layer keys of moved prompts"):
        log_result(verdict(moved=(0.001, 0, 0.03, 0.03)), config)
    refusal = pytest.raises(UnsupportedError, match=r"^self-test failed: reordered blocks")
    with refusal if setting == "refuse" else nullcontext():
        log_result(verdict(reordered=(1.5, 1, 0.001, 0.4)), config)


def test_one_bad_prompt_is_enough_for_keys_and_the_mean_counts_for_kl() -> None:
    bad = (1.5, 1.0, 0.001, 0.6)
    rows = torch.tensor([[GOOD, GOOD, NAIVE, GOOD], [GOOD, bad, NAIVE, GOOD]], dtype=torch.float64)
    (reason,) = judge_prompts(rows, LIMITS, dtype=torch.bfloat16, seconds=0.0).reasons
    assert reason.startswith("keys of reordered blocks")
    # Every dtype of rows has limits.
    for dtype in spliced_prompts.MOVED_KL_LIMITS:
        measured = torch.tensor([[GOOD, GOOD, NAIVE, GOOD]], dtype=torch.float64) / 10
        assert judge_prompts(measured, LIMITS, dtype=dtype, seconds=0.0).passed


class Rows:
    """A pool of random rows in which slots 20 to 29 repeat slots 1 to 10."""

    def __init__(self) -> None:
        self.splicer = Splicer(
            view_pool(models.MHATokenToKVPool(size=100, dtype=torch.float32)),
            read_geometry(models.make_llama(3, models.RotaryEmbedding(num_positions=64)), max_shift=64),
        )
        draw = torch.Generator().manual_seed(1)
        for keys in self.splicer.view.keys:
            keys[:] = torch.randn(keys.shape, generator=draw)
            keys[20:30] = keys[1:11]
        self.logits = torch.randn(50, generator=draw)
        self.full = PromptPass(self.logits, torch.arange(1, 11))

    def measure(self, logits: torch.Tensor | None = None) -> list[float]:
        """Slots 20 to 29 against slots 1 to 10."""
        spliced = PromptPass(self.logits if logits is None else logits, torch.arange(20, 30))
        return [float(value) for value in measure_prompt(self.splicer, self.full, spliced)]


def test_divergence_is_that_of_the_spliced_from_the_full_distribution() -> None:
    rows = Rows()
    other = torch.randn(50, generator=torch.Generator().manual_seed(2))
    p, q = rows.logits.double().softmax(-1), other.double().softmax(-1)
    kl, differs, *_ = rows.measure(other)
    assert kl == pytest.approx(float((p * (p / q).log()).sum()))
    assert differs == float(p.argmax() != q.argmax())
    assert rows.measure(rows.logits + 3)[:2] == pytest.approx([0, 0], abs=1e-7), "a constant changes nothing"


def test_what_is_not_a_number_fails_and_is_still_json() -> None:
    """Rows that nothing wrote are NaN; `/server_info` must say so without breaking."""
    rows = Rows()
    rows.splicer.view.keys[2][20:30] = math.nan
    measured = torch.tensor([[rows.measure(torch.full((50,), math.nan)), GOOD, NAIVE, GOOD]], dtype=torch.float64)
    result = judge_prompts(measured, LIMITS, dtype=torch.float32, seconds=0.0)
    assert result.verdict is Outcome.FAILED
    json.dumps(msgspec.to_builtins(result), allow_nan=False)


VOCAB = 500
POLICY = ReusePolicy(sink_tokens=32, seam_tokens=1)


class Words:
    """A tokenizer of one id a word, or a letter, which begins a prompt with 1."""

    def __init__(self, *, letters: bool = False) -> None:
        self.letters = letters

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids that differ from word to word."""
        words = list(text) if self.letters else text.split()
        return [*([1] if add_special_tokens else []), *(2 + sum(map(ord, word)) % (VOCAB - 2) for word in words)]


TOKENIZERS = {"words": Words(), "letters": Words(letters=True), "none": None}


def prompts_of(name: str, context_len: int = 8_192) -> list[SelfTestPrompt]:
    return built_in_prompts(TOKENIZERS[name], vocab_size=VOCAB, context_len=context_len)


def donors_of(prompts: list[SelfTestPrompt]) -> list[tuple[SelfTestPrompt, Donor]]:
    return [(prompt, donor) for prompt in prompts for donor in (prompt.moved, prompt.reordered)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_donor_has_the_prompts_tokens_where_it_says(name: str) -> None:
    for prompt, donor in donors_of(prompts_of(name)):
        for start, end, donor_start in donor.spans:
            assert prompt.tokens[start:end] == donor.tokens[donor_start : donor_start + end - start]
            assert end < len(prompt.tokens), "the question is computed"
    for prompt in prompts_of(name):
        (_, middle, _), (also_middle, _, _) = prompt.reordered.spans
        assert middle == also_middle
        assert prompt.reordered.tokens[:32] != prompt.tokens[:32], "another header"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_plans_of_the_default_settings_splice_most_of_each_block(name: str) -> None:
    for prompt, donor in donors_of(prompts_of(name)):
        plan = donor.plan(len(prompt.tokens), POLICY, max_gaps=32)
        assert len(plan.runs) == len(donor.spans)
        assert plan.num_spliced > len(prompt.tokens) / 3
        for run in plan.runs:
            assert run.target_start >= 32
            assert run.donor_start - donor.position >= 32
            assert run.donor_end <= len(run.donor)
            moved = run.donor_start - donor.position - run.target_start
            assert prompt.tokens[run.target_start] == donor.tokens[run.target_start + moved]
        ends = [at for span in plan.gaps for at in span]
        assert ends == sorted(ends)
        assert len(plan.gaps) <= len(plan.runs) + 1
