"""The self-test's prompts and plans, what it measures, and how it judges, over a pool and logits made by hand."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import msgspec
import pytest
import torch

from sglang_pic.adapter.startup.prompts import Donor, SelfTestPrompt, built_in_prompts
from sglang_pic.config import read_config
from sglang_pic.core import ReusePolicy
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime import read_geometry, view_pool
from sglang_pic.runtime.checks import spliced_prompts
from sglang_pic.runtime.checks.spliced_prompts import Outcome, PromptPass, judge_prompts, measure_prompt
from sglang_pic.runtime.splice import Splicer
from tests.helpers import rope_models as models

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
