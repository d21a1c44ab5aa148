"""Speculative decoding beside splices: answers with and without a draft, and how many tokens a draft gets right.

Four servers of each setup get the same prompts one after the other, greedy: stock SGLang and the plugin, each with and
without the draft. A fifth, with the plugin and the draft, has the probe throw exact prefix hits away, so that a prompt
that is sent twice is spliced from its own chunks, at shift 0: its draft must then guess as stock's does. On the others
everything that can be is spliced, the end of prompts and what stands behind changed fields too. A run is one token
shorter with a draft; the probe makes it so without one, or answers would come from rows that differ a little.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from pic_bench.compare.arms import Arm, build_arms
from pic_bench.frame import Finding, Result, Study, at_least, keep, result_of
from pic_bench.report.markdown import Table
from pic_bench.serving import Answer, generate, prompt_texts, serving
from tqdm import tqdm

from sglang_pic.errors import BenchError

_OWN_CHUNKS = '{"cost_gate": "off", "self_test": "off", "audit_rate": 0.0}'
_CONFIG = '{"core": {"tail_tokens": 0, "edit": "in_place"}, ' + _OWN_CHUNKS[1:]


class SetupResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model and draft; every list has an answer for each prompt."""

    model: str
    flags: str
    stock: list[Answer]
    stock_draft: list[Answer]
    pic: list[Answer]
    pic_draft: list[Answer]
    shift_zero: list[Answer]
    """The prompts' second time on the server that throws prefix hits away."""


class Speculation(Result, frozen=True, kw_only=True):
    """The result file."""

    prompts: str
    setups: list[SetupResult]


STUDY = Study("speculation", __doc__)
FORM = "'MODEL FLAGS'"
STUDY.add("--setup", action="append", required=True, metavar=FORM, help="a model and its draft's flags; may repeat")
STUDY.add(
    "--prompts",
    default="gen:agent_meta?header=50&body=250&calls=5&sessions=10&seed=5",
    metavar="TRACE",
    help="where prompts come from; by default 50 of agents behind a clock",
)
STUDY.add("--max-tokens", type=at_least(2), default=32, metavar="N", help="tokens of each answer")
STUDY.add("--dtype", default="float32", help="of weights and rows")


@STUDY.measures
def main(args: argparse.Namespace, logs: Path) -> Finding:
    """Measure every setup; 1 where a server failed."""
    prompts = prompt_texts(args.prompts)
    setups = [shlex.split(text) for text in args.setup]
    if short := [text for text, words in zip(args.setup, setups, strict=True) if len(words) < 2]:
        raise BenchError(f"--setup {short[0]!r}: must be a model and the flags of its draft.")
    result = result_of(Speculation, args, setups=[])
    for model, *flags in setups:
        result.setups.append(_measure(model, flags, ["--dtype", args.dtype], prompts, args.max_tokens, logs))
        keep(args, result)
    return Finding(result, table(result.setups))


def _measure(
    model: str, flags: Sequence[str], common: Sequence[str], prompts: Sequence[str], max_tokens: int, logs: Path
) -> SetupResult:
    """The five servers, started one after the other."""
    stock, pic = build_arms(["stock", "pic"], server_args=common, pic_config=_CONFIG)
    (own,) = build_arms(["pic"], server_args=common, pic_config=_OWN_CHUNKS)

    def answers(arm: Arm, flags: Sequence[str], probe: dict[str, object] | None, times: int = 1) -> list[Answer]:
        """To every prompt, sent so many times in a row: the last time's."""
        with serving(model, arm, logs, flags=flags, probe=probe) as server:
            asked = (prompt for prompt in tqdm(prompts, arm.name, mininterval=10.0) for _ in range(times))
            found = [generate(server, prompt, max_new_tokens=max_tokens, with_logprobs=False) for prompt in asked]
            return found[times - 1 :: times]

    return SetupResult(
        model=Path(model).name,
        flags=shlex.join(flags),
        shift_zero=answers(own, flags, {"ignore_prefix": True}, times=2),
        stock=answers(stock, (), None),
        stock_draft=answers(stock, flags, None),
        # The probe ends runs a token early, as beside a draft.
        pic=answers(pic, (), {"early_ends": True}),
        pic_draft=answers(pic, flags, {"early_ends": True}),
    )


def table(results: Sequence[SetupResult]) -> Table:
    """What the result file's answers come to."""
    header = [
        *("model", "draft", "prompts", "same answer, stock", "same answer, spliced", "spliced share"),
        *("accept length: stock", "spliced", "at shift 0", "prompts guessed as stock's at shift 0"),
    ]
    return Table(header, [_row(result) for result in results])


def _row(result: SetupResult) -> list[str]:
    count = len(result.stock)
    same = [
        sum(one.ids == other.ids for one, other in zip(*pair, strict=True))
        for pair in ((result.stock, result.stock_draft), (result.pic, result.pic_draft))
    ]
    alike = sum(
        (one.ids, one.num_verified) == (other.ids, other.num_verified)
        for one, other in zip(result.stock_draft, result.shift_zero, strict=True)
    )
    spliced = sum(answer.spliced_tokens for answer in result.pic_draft)
    lengths = [accept_length(answers) for answers in (result.stock_draft, result.pic_draft, result.shift_zero)]
    return [
        *(result.model, result.flags, str(count), *(f"{number} of {count}" for number in same)),
        f"{100 * spliced / sum(answer.prompt_tokens for answer in result.pic_draft):.1f} %",
        *(*(f"{length:.3f}" for length in lengths), f"{alike} of {count}"),
    ]


def accept_length(answers: Sequence[Answer]) -> float:
    """Tokens of a verified pass, over all answers.

    Raises:
        BenchError: no answer was verified.
    """
    if not (verified := sum(answer.num_verified for answer in answers)):
        raise BenchError("no answer says how often its draft was verified (spec_verify_ct): did the server have one?")
    return sum(len(answer.ids) - 1 for answer in answers) / verified


if __name__ == "__main__":
    sys.exit(main())
