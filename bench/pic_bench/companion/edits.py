"""The changed-field experiment: its prompts, the spans that each policy splices, and the answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

from pic_traces.encode import Encoder, load_encoder

from pic_bench.companion.snippets import Row, SnippetPool
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.cases.edits import edit_jobs
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.compared import recovered
from pic_bench.fidelity.config import read_config, read_probes
from pic_bench.fidelity.record import Probe
from pic_bench.report.study import RESULTS
from sglang_pic.config import PicConfig
from sglang_pic.core import MESSAGE_BREAK, ContentIndex, CoreConfig, Lexicon, PlanOptions, RowSource, Span, as_tokens

_FOLDERS = {
    "fidelity-edits": "SmolLM2, float32",
    "fidelity-edits-bfloat16": "SmolLM2, bfloat16",
    "fidelity-edits-mla": "smollm2-mla, float32",
}
_POLICIES = ("in_place", "notes")  # `recompile` splices nothing
_SAID = "[this]"
_Text = Callable[[Sequence[int]], str]


class Segment(Row, frozen=True, kw_only=True):
    """A stretch of the new prompt. `text` and `old` are numbers of texts."""

    text: int
    old: int | None = None
    """Where the prompts differ: the text here in the old one."""
    in_place: bool = False
    notes: bool = False


class Outcome(Row, frozen=True, kw_only=True):
    """The measurements under one policy; of the two full prefills only their answers."""

    said: str
    """The likeliest first token."""
    spliced: int = 0
    kl: float = 0.0
    recovery: float | None = None
    """None where the answer is not meant to change, or too little to tell."""


class Prompt(Row, frozen=True, kw_only=True):
    """A prompt behind the same prompt with other values."""

    template: str
    family: str
    distance: int
    num_fields: int
    prompt_len: int
    old_answer: str | None
    """What the answer goes on with, under the old value and under the new one; None where nothing is to change."""
    new_answer: str | None
    segments: list[Segment]
    """Empty where today's planner would splice other tokens than the recorded server did."""
    outcomes: list[dict[str, Outcome]]
    """By arm, for each format; empty where the prompt was not measured in it."""


class Edits(Row, frozen=True, kw_only=True):
    """All prompts that a policy was measured on, and the formats they were measured in, each with its record."""

    formats: list[tuple[str, str]]
    prompts: list[Prompt]


def read_edits(tokenizer: Path, texts: SnippetPool) -> Edits:
    """The experiment's prompts, written again from their templates.

    Raises:
        BenchError: a record cannot be read.
    """
    text, plans = ModelText(tokenizer), _Plans(load_encoder(str(tokenizer)))
    outcomes: dict[str, list[dict[str, Probe]]] = defaultdict(lambda: [{} for _ in _FOLDERS])
    cases: dict[str, Case] = {}
    for number, name in enumerate(_FOLDERS):
        folder = RESULTS / name
        config = read_config(folder)
        jobs = edit_jobs(config.edit_set, config.sizes.edits, text, config.seed, ())
        cases |= {job.case.name: job.case for job in jobs}
        for probe in read_probes(folder):
            outcomes[probe.prompt][number][probe.arm] = probe
    prompts = [
        _prompt(case, outcomes[name], text, plans, texts)
        for name, case in cases.items()
        if any("notes" in arms for arms in outcomes[name])
    ]
    prompts.sort(key=lambda one: (one.family, one.template, one.num_fields, one.distance))
    return Edits(formats=[(title, name) for name, title in _FOLDERS.items()], prompts=prompts)


class _Plans:
    """The spans that a server splices in a prompt after another one."""

    def __init__(self, encoder: Encoder) -> None:
        self._delimiters = encoder.delimiters
        known = enumerate(encoder.texts)
        self._lexicon = Lexicon(MESSAGE_BREAK if token in self._delimiters else text for token, text in known)

    def spliced(self, case: Case, edit: str) -> list[Span]:
        """Under one policy."""
        assert case.edited is not None
        server, old = PicConfig(), as_tokens(case.edited.old)
        index = ContentIndex(CoreConfig(edit=edit), lexicon=self._lexicon)  # type: ignore[arg-type]
        index.publish("", old, [(0, len(old))], delimiters=self._delimiters)
        options = PlanOptions(max_gaps=server.max_gaps, max_runs=server.max_runs)
        plan = index.plan("", as_tokens(case.prompt), prefix_len=0, rows=RowSource(), options=options)
        return [(run.target_start, run.target_end) for run in plan.runs]


def _prompt(case: Case, arms: Sequence[dict[str, Probe]], text: ModelText, plans: _Plans, texts: SnippetPool) -> Prompt:
    assert case.edited is not None
    edited = case.edited
    spliced = {policy: plans.spliced(case, policy) for policy in _POLICIES}
    recorded = {policy: {found[policy].chunk_hit_tokens for found in arms if policy in found} for policy in _POLICIES}
    is_same = all(recorded[policy] == {sum(b - a for a, b in spliced[policy])} for policy in _POLICIES)
    old_answer, new_answer = (text.text([answer]) for answer in edited.answers) if edited.answers else (None, None)
    return Prompt(
        template=edited.edit.template,
        family=edited.edit.family.value,
        distance=edited.edit.distance,
        num_fields=edited.edit.num_fields,
        prompt_len=len(case.prompt),
        old_answer=old_answer,
        new_answer=new_answer,
        segments=list(_segments(case.prompt, edited.old, spliced, text.text, texts)) if is_same else [],
        outcomes=[_outcomes(found) if "notes" in found else {} for found in arms],
    )


def _outcomes(arms: dict[str, Probe]) -> dict[str, Outcome]:
    reads_field = not arms["full"].uses_no_field(arms["stale"])
    return {
        name: Outcome(
            said=(probe.text or "").rpartition(_SAID)[2].strip(),
            spliced=probe.chunk_hit_tokens,
            kl=probe.kl,
            recovery=recovered(probe, arms["full"], arms["stale"]) if reads_field else None,
        )
        for name, probe in arms.items()
    }


def _segments(
    new: Sequence[int], old: Sequence[int], spliced: dict[str, list[Span]], text: _Text, texts: SnippetPool
) -> Iterator[Segment]:
    differences = {b: (old[i:j], k) for i, j, b, k in _differences(old, new, text)}
    cuts = {0, len(new), *differences, *(end for _, end in differences.values())}
    cuts.update(cut for spans in spliced.values() for span in spans for cut in span)
    for start, end in pairwise(sorted(cuts)):
        before = differences.get(start)
        inside = {policy: any(a <= start < b for a, b in spans) for policy, spans in spliced.items()}
        old_text = None if before is None else texts.add(text(before[0]))
        yield Segment(text=texts.add(text(new[start:end])), old=old_text, **inside)


def _differences(old: Sequence[int], new: Sequence[int], text: _Text) -> list[tuple[int, int, int, int]]:
    """`old[i:j]` stands for `new[b:k]`, for every place at which the prompts differ, in whole words."""
    found: list[tuple[int, int, int, int]] = []
    for tag, i, j, b, k in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        # What lies around a difference is equal in both, so that both sides grow alike.
        before = next(n for n in range(b + 1) if n == b or not _joins(text, new[b - n - 1], (*new[b:k], *old[i:j])[0]))
        behind = next(n for n in range(len(new) - k) if not _joins(text, new[k + n - 1], new[k + n]))
        # Where words are only missing, the next one marks the place.
        behind += b - before == k + behind
        if found and i - before <= found[-1][1]:
            first = found.pop()
            found.append((first[0], j + behind, first[2], k + behind))
        else:
            found.append((i - before, j + behind, b - before, k + behind))
    return found


def _joins(text: _Text, left: int, right: int) -> bool:
    """Whether two tokens, one after the other, are of one word."""
    return text([left])[-1:].isalnum() and text([right])[:1].isalnum()
