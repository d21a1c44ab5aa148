"""Is it the splice that errs, or its context? Questions over spliced documents in plain PyTorch, with transformers.

It builds the prompts of `sglang-pic fidelity --experiment qa` and splices their documents from donors whose context is
more or less the prompt's own, without the server's planner, kernels or pools: the model's own rotary module turns the
keys. First it proves itself: keys of the prompt computed further on and turned back must give the full prefill's
logits.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from pic_bench.fidelity.cases.case import Case, find_block
from pic_bench.fidelity.cases.qa import QaFrames, qa_case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import Donors
from pic_bench.frame import Finding, Result, Study, at_least, result_of
from pic_bench.report.markdown import Table, markdown_table
from pic_traces.questions import generated_questions, is_question_set, read_questions
from torch import Tensor
from tqdm import tqdm

from sglang_pic.errors import BenchError
from sglang_pic.platform import torchvision_shim
from sglang_pic.runtime.divergence import kl_and_differs

Ids = list[int]

FORCED: Final = 8
"""Tokens of the answer that must each be the likeliest, given those before, for it to be right."""
MOST_ERROR: Final = 1e-4
"""KL in nats, float32, that the control may have: rounding, and nothing else."""
_CONTROL_SHIFT: Final = 37
_OTHER_WORDS: Final = "Once upon a time there was a long line that said nothing at all. " * 2


class Donor(NamedTuple):
    """Where one document's rows come from: the ids of a request, and where in it the document begins."""

    ids: Ids
    start: int


class Placement(NamedTuple):
    """One way to have the documents computed beforehand, and the seams to try with it."""

    name: str
    donors: list[Donor]
    seams: tuple[int, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way, over all prompts."""

    donors: str
    seam_tokens: int | None
    """None: nothing was spliced."""
    prompts: int
    right: int
    kl_mean: float
    """KL in nats from the full prefill's first token to this one's, over the whole vocabulary."""
    same_first_token: int


class PlainSplice(Result, frozen=True, kw_only=True):
    """The result file."""

    model: str
    source: str
    seed: int
    control_kl: float
    """The largest KL of the control."""
    rows: list[Row]


class PlainModel:
    """A checkpoint in float32 whose cached keys can be moved.

    Raises:
        BenchError: its keys are not rotated over the whole head by halves (Llama, Qwen: they are), or are scaled.
    """

    def __init__(self, folder: Path) -> None:
        torchvision_shim.install()
        from transformers import AutoModelForCausalLM, DynamicCache

        self._new_cache = DynamicCache
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._rotary: Any = getattr(self._model.model, "rotary_emb", None)
        head_dim = getattr(self._model.model.layers[0].self_attn, "head_dim", None)
        if not self._rotary or head_dim != 2 * len(self._rotary.inv_freq) or self._rotary.attention_scaling != 1:
            raise BenchError(f"--model {str(folder)!r}: only models whose keys are rotated whole, and not scaled, fit.")

    def full(self, prompt: Ids, forced: Ids) -> Tensor:
        """Logits of the prompt's last token and of all forced ones but the last, shape (len(forced), vocabulary)."""
        return self._forward([*prompt, *forced[:-1]], self._new_cache())[len(prompt) - 1 :]

    def rows(self, ids: Ids, offset: int = 0) -> Any:
        """The cache of a request, computed at positions from `offset` on."""
        cache = self._new_cache()
        self._forward(ids, cache, offset)
        return cache

    def spliced(self, case: Case, sources: Sequence[tuple[Any, int, int]], forced: Ids, seam_tokens: int) -> Tensor:
        """Logits as `full` gives them, every block but its seam taken from a donor and turned.

        Args:
            sources: for each block the donor's cache, the block's row in it, and that row's position.
        """
        cache, at = self._new_cache(), 0
        for (start, end), (donor, row, position) in zip(case.blocks, sources, strict=True):
            seam = min(seam_tokens, end - start)
            self._forward(case.prompt[at : start + seam], cache)
            for number, layer in enumerate(donor.layers):
                taken = slice(row + seam, row + end - start)
                keys, values = layer.keys[:, :, taken], layer.values[:, :, taken]
                cache.update(self._turned(keys, start - position), values, number)
            at = end
        rest = [*case.prompt[at:], *forced[:-1]]
        return self._forward(rest, cache)[len(case.prompt) - at - 1 :]

    def _forward(self, ids: Ids, cache: Any, offset: int = 0) -> Tensor:
        positions = torch.arange(len(ids))[None] + cache.get_seq_length() + offset
        with torch.no_grad():
            answer = self._model(torch.tensor([ids]), past_key_values=cache, position_ids=positions, use_cache=True)
        return answer.logits[0]

    def _turned(self, keys: Tensor, shift: int) -> Tensor:
        cos, sin = self._rotary(keys, torch.tensor([[shift]]))
        half = keys.shape[-1] // 2
        turned = torch.cat([-keys[..., half:], keys[..., :half]], dim=-1)
        return keys * cos[:, None] + turned * sin[:, None]


def placements(frames: QaFrames, text: ModelText, case: Case) -> list[Placement]:
    """The ways to compute a question's documents beforehand, from the worst context to nearly the prompt's own."""
    blocks = [case.prompt[start:end] for start, end in case.blocks]
    (other_order,) = case.donors[Donors.CONTEXT]
    starts = [find_block(other_order, block) for block in blocks]
    header, markers = frames.donor.header, frames.donor.markers
    alone = [Donor([*header, *markers[0], *block], len(header) + len(markers[0])) for block in blocks]
    same, places = list(header), []
    for marker, block in zip(markers, blocks, strict=False):
        same += marker
        places.append(len(same))
        same += block
    before = text.ids(_OTHER_WORDS)
    moved = [*before, *case.prompt[: case.blocks[-1].end]]
    return [
        Placement("in another order", [Donor(other_order, start) for start in starts], (0, 32)),
        Placement("each alone", alone, (32,)),
        Placement("same order, other words around", [Donor(same, start) for start in places], (1, 32)),
        Placement("the same text behind a line", [Donor(moved, len(before) + s) for s, _ in case.blocks], (1,)),
    ]


class _Outcome(NamedTuple):
    """One prompt in one way."""

    right: bool
    kl: float
    same_first_token: bool


def measure(model: PlainModel, frames: QaFrames, text: ModelText, cases: Iterable[Case]) -> tuple[list[Row], float]:
    """Every prompt in full and in every way; with it the control's largest KL.

    Raises:
        BenchError: the control is off by more than rounding, so no figure would mean anything.
    """
    found: dict[tuple[str, int | None], list[_Outcome]] = defaultdict(list)
    control = 0.0
    for case in cases:
        gold = case.gold[:FORCED]
        full = model.full(case.prompt, gold)
        itself = model.rows(case.prompt, _CONTROL_SHIFT)
        own = [(itself, block.start, block.start + _CONTROL_SHIFT) for block in case.blocks]
        control = max(control, _outcome(full, model.spliced(case, own, gold, 0), gold).kl)
        if not control <= MOST_ERROR:
            raise BenchError(f"{case.name}: keys moved by {_CONTROL_SHIFT} and back differ by a KL of {control:.1e}.")
        found["full prefill", None].append(_outcome(full, full, gold))
        for name, donors, seams in placements(frames, text, case):
            rows = {ids: model.rows([*ids]) for ids in {tuple(donor.ids) for donor in donors}}
            sources = [(rows[tuple(donor.ids)], donor.start, donor.start) for donor in donors]
            for seam in seams:
                found[name, seam].append(_outcome(full, model.spliced(case, sources, gold, seam), gold))
    result = [
        Row(
            donors=name,
            seam_tokens=seam,
            prompts=len(outcomes),
            right=sum(outcome.right for outcome in outcomes),
            kl_mean=float(np.mean([outcome.kl for outcome in outcomes])),
            same_first_token=sum(outcome.same_first_token for outcome in outcomes),
        )
        for (name, seam), outcomes in found.items()
    ]
    return result, control


def _outcome(full: Tensor, logits: Tensor, gold: Ids) -> _Outcome:
    kl, differs = kl_and_differs(full[0], logits[0])
    return _Outcome(right=logits.argmax(-1).tolist() == gold, kl=float(kl), same_first_token=not differs)


STUDY = Study("plain_splice", __doc__, seed=0)
STUDY.add("--model", type=Path, required=True, metavar="DIR", help="a checkpoint with its tokenizer")
STUDY.add("--data", type=Path, metavar="FILE", help="a question set (default: generated pairs of values)")
STUDY.add("--questions", type=at_least(1), default=10, metavar="N", help="questions to ask")
STUDY.add("--quiet", action="store_true", help="no progress bar")


@STUDY.measures
def main(args: argparse.Namespace, _logs: Path) -> Finding:
    """Measure; 1 where the model or the questions do not fit."""
    if args.data is not None and not is_question_set(args.data):
        raise BenchError(f"--data {str(args.data)!r}: no question set; its lines must have `documents` and `qa`.")
    text = ModelText(args.model)
    frames, model = QaFrames(text), PlainModel(args.model)
    questions = (
        list(generated_questions("pairs", limit=args.questions, seed=args.seed))
        if args.data is None
        else read_questions(args.data, limit=args.questions, seed=args.seed)
    )
    bar = tqdm(questions, "questions", file=sys.stderr, disable=args.quiet, leave=False)
    rows, control = measure(model, frames, text, (qa_case(frames, text, q, seed=args.seed) for q in bar))
    source = args.data.name if args.data else "generated pairs"
    result = result_of(PlainSplice, args, model=args.model.name, source=source, control_kl=control, rows=rows)
    shown = markdown_table(_table(rows))
    told = f"The control, the prompt's own keys moved and turned back: a KL of {control:.1e} at most."
    return Finding(result, f"{shown}\n\n{told}")


def _table(rows: Sequence[Row]) -> Table:
    cells = []
    for row in rows:
        seam = "" if row.seam_tokens is None else str(row.seam_tokens)
        right = f"{row.right} of {row.prompts}"
        cells.append([row.donors, seam, right, f"{row.kl_mean:.2g}", str(row.same_first_token)])
    return Table(["donors", "seam", "right", "KL of the first token", "same first token"], cells)


if __name__ == "__main__":
    sys.exit(main())
