"""Serves a case under every arm, checks the controls, and compares with the full prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pic_bench.fidelity import metrics
from pic_bench.fidelity.arms import FULL, STALE, Arm
from pic_bench.fidelity.cases.case import Case, Edited, Job
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import SURE, Probe
from pic_bench.fidelity.target import NOBODY, Recorded, Target

_TEXT_TOKENS = 48  # so much of the prompt's end goes into a record


class Step(NamedTuple):
    """The prompts that were served at once, for progress, and their records."""

    label: str
    prompt_tokens: int
    probes: Sequence[Probe] = ()


class Unrealised(Exception):
    """A prompt was not served as its case means it: it is left out, under every arm, and counted."""


class Reference:
    """The full prefill, with the values that every comparison needs."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.logprobs = metrics.log_softmax(recorded.logits)
        self.probabilities = np.exp(self.logprobs)
        self.top1 = int(recorded.logits[0].argmax())
        self.top1_probability = float(self.probabilities[0].max())


def measure(job: Job, target: Target, text: ModelText, *, dtype: str) -> list[Probe]:
    """One record for each arm, in their order; the first arm is the full prefill.

    Only those of the two full prefills where these say that nothing is to be recovered.

    Raises:
        Unrealised: a control was not what it should be.
        BenchError: the server refused a request or is gone.
    """
    case = job.case
    assert job.arms[0] == FULL, "the full prefill comes first"
    reference: Reference | None = None
    probes: dict[str, Probe] = {}
    for arm in job.arms:
        prompt, donors_from = case.prompt, _key(case, STALE)
        if case.edited is not None and arm == STALE:
            # The old prompt's rows are the donors of all arms after it.
            prompt, donors_from = case.edited.old, NOBODY
        recorded = target.record(prompt, case.gold, arm, key=_key(case, arm), donors_from=donors_from)
        check_control(arm, recorded)
        reference = reference or Reference(recorded)
        probe = compare(reference, recorded, arm, case, dtype, text)
        probes[arm.label] = _add_edit(probe, case.edited, recorded) if case.edited else probe
        if arm == STALE and probes[FULL.label].uses_no_field(probes[STALE.label]):
            break
    return list(probes.values())


def compare(reference: Reference, recorded: Recorded, arm: Arm, case: Case, dtype: str, text: ModelText) -> Probe:
    """The record of one request."""
    logprobs = metrics.log_softmax(recorded.logits)
    apart = metrics.divergence(reference.logprobs, logprobs, reference.probabilities)
    num_gold = len(case.gold)
    top1 = int(recorded.logits[0].argmax())
    alike = reference.logprobs[:num_gold].argmax(axis=-1) == logprobs[:num_gold].argmax(axis=-1)
    sure = reference.probabilities[:num_gold].max(axis=-1) > SURE
    return Probe(
        experiment=case.experiment,
        dtype=dtype,
        prompt=case.name,
        source=case.source,
        arm=arm.name,
        donors=arm.donors,
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
        text=_text(case, text, [reference.top1], [top1]),
    )


def check_control(arm: Arm, recorded: Recorded) -> None:
    """Whether a full prefill was computed in full.

    Raises:
        Unrealised: it was not.
    """
    hits = recorded.prefix_hit_tokens, recorded.chunk_hit_tokens
    if (arm.is_control or arm == STALE) and any(hits):
        raise Unrealised("{}: {} prefix hit and {} chunk hit tokens, none were meant".format(arm.label, *hits))


def _add_edit(probe: Probe, edited: Edited, recorded: Recorded) -> Probe:
    """The record with what was edited, and how much likelier the new answer is than the old one."""
    logits = recorded.logits[0].astype(float)
    odds = None if edited.answers is None else float(logits[edited.answers.new] - logits[edited.answers.old])
    # The stale arm costs nothing: it takes the old prompt's answer for the new one's.
    free = {"prefix_hit_tokens": probe.prompt_tokens} if probe.arm == STALE.name else {}
    return msgspec.structs.replace(probe, edit=edited.edit, log_odds=odds, **free)


def _key(case: Case, arm: Arm) -> str:
    """The namespace of an arm's own rows."""
    return f"{case.name}/{arm.label}"


def _text(case: Case, text: ModelText, full: Sequence[int], this: Sequence[int]) -> str:
    end = text.text(case.prompt[-_TEXT_TOKENS:])
    return f"{end}\n[full prefill] {text.text(full)}\n[this] {text.text(this)}"
