"""Compares what a server recorded of one request with the full prefill of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pic_bench.fidelity import metrics
from pic_bench.fidelity.arms import Arm
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import SURE, Probe
from pic_bench.fidelity.target import Recorded

_TEXT_TOKENS = 48  # so much of the prompt's end goes into a record


class Step(NamedTuple):
    """The prompts that were served at once, for progress, and their records."""

    label: str
    prompt_tokens: int
    probes: Sequence[Probe] = ()


class Reference:
    """The full prefill, with the values that every comparison needs."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.logprobs = metrics.log_softmax(recorded.logits)
        self.probabilities = np.exp(self.logprobs)
        self.top1 = int(recorded.logits[0].argmax())
        self.top1_probability = float(self.probabilities[0].max())


def compare(reference: Reference, recorded: Recorded, arm: Arm, case: Case, dtype: str, text: ModelText) -> Probe:
    """The record of one request."""
    logprobs = metrics.log_softmax(recorded.logits)
    apart = metrics.divergence(reference.logprobs, logprobs, reference.probabilities)
    num_gold = len(case.gold)
    top1 = int(recorded.logits[0].argmax())
    alike = reference.logprobs[:num_gold].argmax(axis=-1) == logprobs[:num_gold].argmax(axis=-1)
    sure = reference.probabilities[:num_gold].max(axis=-1) > SURE
    end = text.text(case.prompt[-_TEXT_TOKENS:])
    return Probe(
        dtype=dtype,
        prompt=case.name,
        source=case.source,
        arm=arm.name,
        prompt_tokens=len(case.prompt),
        prefix_hit_tokens=recorded.prefix_hit_tokens,
        chunk_hit_tokens=recorded.chunk_hit_tokens,
        top1_probability=reference.top1_probability,
        kl=float(apart[0]),
        cosine=metrics.centred_cosine(reference.recorded.logits[0], recorded.logits[0]),
        top1_agrees=top1 == reference.top1,
        forced_kl=float(apart[:num_gold].mean()) if num_gold else None,
        forced_agreement=float(alike.mean()) if num_gold else None,
        sure_tokens=int(sure.sum()),
        sure_flips=int((sure & ~alike).sum()),
        gold_tokens=num_gold,
        gold_nll=metrics.mean_nll(logprobs[:num_gold], case.gold) if num_gold else None,
        text=f"{end}\n[full prefill] {text.text([reference.top1])}\n[this] {text.text([top1])}",
    )
