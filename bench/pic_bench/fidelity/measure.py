"""Serves a case under every arm, checks that what was meant was spliced, and compares with the full prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pic_bench.fidelity import metrics
from pic_bench.fidelity.arms import EXACT, FULL, STALE, Arm
from pic_bench.fidelity.cases.case import Case, Edited, Job, Span
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import SURE, Donors, Probe
from pic_bench.fidelity.target import NOBODY, Recorded, Target
from pic_bench.report.stats import common_len

_TEXT_TOKENS = 48  # so much of the prompt's end goes into a record


class Step(NamedTuple):
    """What was served at once, for progress, and its records."""

    label: str
    prompt_tokens: int
    probes: Sequence[Probe] = ()


class Unrealised(Exception):
    """A prompt was not served as its case means it: it is left out, under every arm, and counted."""


class Reference:
    """The full prefill, with what every comparison needs of it."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.logprobs = metrics.log_softmax(recorded.logits)
        self.probabilities = np.exp(self.logprobs)
        self.top1 = int(recorded.logits[0].argmax())
        self.top1_probability = float(self.probabilities[0].max())


def measure(job: Job, target: Target, text: ModelText, *, dtype: str, page_size: int) -> list[Probe]:
    """One record for each arm, in their order; the first arm is the full prefill.

    Of EDITS only those of the two full prefills where these say that nothing is to be recovered, and of TASKS only the
    full prefill's where its answer is wrong.

    Raises:
        Unrealised: an arm's blocks were not spliced as meant, or a control was not what it should be.
        BenchError: the server refused a request or is gone.
    """
    case = job.case
    assert job.arms[0] == FULL, "the full prefill comes first"
    computed: set[Donors] = set()
    reference: Reference | None = None
    probes: dict[str, Probe] = {}
    for arm in job.arms:
        prompt, donors_from = case.prompt, _donors_key(case, arm.donors)
        if arm.donors not in computed and not arm.is_control:
            computed.add(arm.donors)
            for donor in case.donors.get(arm.donors, ()):
                target.compute(donor, key=donors_from)
        if case.edited is not None and arm == STALE:
            # The old prompt's rows are the donors of all arms after it.
            prompt, donors_from = case.edited.old, NOBODY
        recorded = target.record(prompt, case.gold, arm, key=_key(case, arm), donors_from=donors_from)
        check_realised(case, arm, recorded, page_size)
        reference = reference or Reference(recorded)
        probe = compare(reference, recorded, arm, case, dtype, text)
        probes[arm.label] = _add_edit(probe, case.edited, recorded) if case.edited else probe
        if arm == STALE and probes[FULL.label].uses_no_field(probes[STALE.label]):
            break
        # Where the likeliest tokens are the gold ones, so is the answer.
        if arm == FULL and case.judge is not None and recorded.logits[:-1].argmax(axis=-1).tolist() != case.gold:
            _add_answers(job, [arm], target, text, probes)
            if not probes[arm.label].right:
                return list(probes.values())
    if job.answer_tokens:
        _add_answers(job, job.arms, target, text, probes)
    return list(probes.values())


def compare(reference: Reference, recorded: Recorded, arm: Arm, case: Case, dtype: str, text: ModelText) -> Probe:
    """The record of one request, less what is generated."""
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
        num_blocks=len(case.blocks) or None,
        donors=arm.donors,
        prompt_tokens=len(case.prompt),
        prefix_hit_tokens=recorded.prefix_hit_tokens,
        chunk_hit_tokens=recorded.chunk_hit_tokens,
        block_tokens=sum(end - start for start, end in case.blocks),
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


def check_realised(case: Case, arm: Arm, recorded: Recorded, page_size: int) -> None:
    """Whether a request was served as its arm means it; without a seam no blocks are meant.

    On pages of more than one token a run begins and ends at a page's edge, so that much of a block may be computed.

    Raises:
        Unrealised: it was not.
    """
    if arm.is_control or arm == STALE:
        # The first gold position's logits are asked for, so the last token of the prompt is computed in any case.
        wanted = len(case.prompt) - 1 if arm == EXACT else 0
        if recorded.chunk_hit_tokens or not 0 <= wanted - recorded.prefix_hit_tokens < page_size:
            raise Unrealised(
                f"{arm.label}: {recorded.prefix_hit_tokens} prefix hit and {recorded.chunk_hit_tokens} chunk hit "
                f"tokens, {wanted} and 0 were meant"
            )
        return
    if arm.seam_tokens is None or not case.blocks:
        return
    slack = 2 * (page_size - 1)
    for block in case.blocks:
        inside = _inside(recorded, block)
        meant = block.end - block.start - arm.seam_tokens
        if not meant - slack <= inside <= meant:
            raise Unrealised(f"{arm.label}: {inside} tokens of block {tuple(block)} were spliced, {meant} were meant")
    outside = sum(end - start for start, end in recorded.spliced) - sum(_inside(recorded, b) for b in case.blocks)
    if outside:
        raise Unrealised(f"{arm.label}: {outside} tokens outside all blocks were spliced")


def _add_edit(probe: Probe, edited: Edited, recorded: Recorded) -> Probe:
    """The record with what was edited, and how much likelier the new answer is than the old one."""
    logits = recorded.logits[0].astype(float)
    odds = None if edited.answers is None else float(logits[edited.answers.new] - logits[edited.answers.old])
    # What is stale costs nothing: the old prompt's answer stands for the new one's.
    free = {"prefix_hit_tokens": probe.prompt_tokens} if probe.arm == STALE.name else {}
    return msgspec.structs.replace(probe, edit=edited.edit, log_odds=odds, **free)


def _add_answers(job: Job, arms: Sequence[Arm], target: Target, text: ModelText, probes: dict[str, Probe]) -> None:
    """Generate under these arms, of which the first is the full prefill, and put the answers into their records."""
    case = job.case
    generated = target.greedy(case.prompt, arms, [_key(case, arm) for arm in arms], job.answer_tokens)
    full = generated[0]
    for arm, ids in zip(arms, generated, strict=True):
        answer = text.answer(ids)
        score = metrics.score_answer(answer, case.answers, contains=case.exact_score) if case.answers else None
        probes[arm.label] = msgspec.structs.replace(
            probes[arm.label],
            greedy_tokens=len(ids),
            agreed_tokens=common_len(full, ids),
            score=score and score.value,
            exact_match=score and score.exact,
            right=case.judge and case.judge(answer, text.answer(full)),
            text=_text(case, text, full, ids),
        )


def _inside(recorded: Recorded, block: Span) -> int:
    return sum(max(0, min(end, block.end) - max(start, block.start)) for start, end in recorded.spliced)


def _key(case: Case, arm: Arm) -> str:
    """The namespace of an arm's own rows; the hit of the exact arm is on the full prefill's."""
    return f"{case.name}/{(FULL if arm == EXACT else arm).label}"


def _donors_key(case: Case, kind: Donors) -> str:
    return _key(case, STALE) if kind is Donors.EDITED else f"{case.name}/donors-{kind.value}"


def _text(case: Case, text: ModelText, full: Sequence[int], this: Sequence[int]) -> str:
    end = text.text(case.prompt[-_TEXT_TOKENS:])
    return f"{end}\n[full prefill] {text.text(full)}\n[this] {text.text(this)}"
