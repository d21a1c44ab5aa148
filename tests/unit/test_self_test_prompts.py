"""The built-in prompts of the self-test: donors hold what the prompt says they hold, and plans are lawful."""

from __future__ import annotations

import pytest

from sglang_pic.adapter.startup.prompts import Donor, SelfTestPrompt, built_in_prompts
from sglang_pic.core import ReusePolicy

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


def test_shifts_are_near_and_far_and_never_nothing() -> None:
    shifts = [
        abs(run.shift)
        for prompt, donor in donors_of(prompts_of("words"))
        for run in donor.plan(len(prompt.tokens), POLICY, max_gaps=32).runs
    ]
    assert 0 < min(shifts) < 100
    assert max(shifts) >= 6_000


def test_settings_limit_runs_and_gaps() -> None:
    prompt = prompts_of("words")[0]
    total = len(prompt.tokens)
    assert len(prompt.reordered.plan(total, POLICY, max_gaps=2).runs) == 1
    assert prompt.reordered.plan(total, ReusePolicy(sink_tokens=1_000, seam_tokens=1), max_gaps=32).runs == ()
    wide = prompt.reordered.plan(total, ReusePolicy(sink_tokens=0, seam_tokens=9), max_gaps=32)
    assert [run.seam_len for run in wide.runs] == [9, 9]
    assert [run.target_start for run in wide.runs] == [start + 9 for start, _, _ in prompt.reordered.spans]


@pytest.mark.parametrize("context_len", [500, 300])
def test_a_short_context_keeps_positions_inside(context_len: int) -> None:
    for prompt, donor in donors_of(prompts_of("words", context_len)):
        assert len(prompt.tokens) <= context_len
        assert 0 <= donor.position <= context_len - len(donor.tokens)
        if donor is prompt.moved:
            assert donor.position > 0


def test_texts_of_any_tokenizer_stay_short_and_fit_the_context() -> None:
    assert all(len(prompt.tokens) <= 64 + 128 + 128 + 48 for prompt in prompts_of("letters"))
    assert prompts_of("letters", 200) == []
    assert prompts_of("none") == prompts_of("none"), "seeded"
