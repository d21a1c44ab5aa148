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
from typing import Any

import msgspec
from pic_traces.source import load
from tqdm import tqdm

from pic_bench.compare.arms import Arm, build_arms
from pic_bench.compare.command import with_servers
from pic_bench.compare.server import Server, free_port, launch_command
from pic_bench.environment import Environment, capture_environment
from pic_bench.out_folder import write_json
from pic_bench.probe_plugin import PROBE_VARIABLE
from pic_bench.report.markdown import Table, markdown_table
from sglang_pic.errors import BenchError

_OWN_CHUNKS = '{"cost_gate": "off", "self_test": "off", "audit_rate": 0.0}'
_CONFIG = '{"core": {"tail_tokens": 0, "edit": "in_place"}, ' + _OWN_CHUNKS[1:]
_AS_WITH_DRAFT = '{"early_ends": true}'
_IGNORE_PREFIX = '{"ignore_prefix": true}'


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt on one server."""

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    spliced_tokens: int
    num_verified: int
    """Passes of the target after the prompt's own; 0 without a draft."""


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


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result file."""

    schema_version: int = 1
    environment: Environment
    prompts: str
    setups: list[SetupResult]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; 1 where a server failed, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.speculation", description=__doc__.splitlines()[0])
    add = parser.add_argument
    form = "'MODEL FLAGS'"
    add("--setup", action="append", required=True, metavar=form, help="a model and the flags of its draft; may repeat")
    add(
        "--prompts",
        default="gen:agent_meta?header=50&body=250&calls=5&sessions=10&seed=5",
        help="source of the prompts (default: 50 of agents behind a clock)",
    )
    add("--max-tokens", type=int, default=32, help="of each answer (default: 32)")
    add("--dtype", default="float32", help="of weights and rows (default: float32)")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON there")
    args = parser.parse_args(argv)
    return with_servers("speculation", lambda logs: _run(args, logs))


def _run(args: argparse.Namespace, logs: Path) -> int:
    prompts = [
        "\n".join(str(message["content"]) for message in call.messages)
        for session in load(args.prompts)
        for call in session.calls()
    ]
    setups = [shlex.split(text) for text in args.setup]
    if short := [text for text, words in zip(args.setup, setups, strict=True) if len(words) < 2]:
        raise BenchError(f"--setup {short[0]!r}: must be a model and the flags of its draft.")
    environment, results = capture_environment(), []
    for model, *flags in setups:
        results.append(measure(model, flags, ["--dtype", args.dtype], prompts, args.max_tokens, logs))
        if args.out is not None:
            write_json(args.out, Speculation(environment=environment, prompts=args.prompts, setups=results))
    print(markdown_table(table(results)))
    return 0


def measure(
    model: str, flags: Sequence[str], common: Sequence[str], prompts: Sequence[str], max_tokens: int, logs: Path
) -> SetupResult:
    """Start the five servers one after the other.

    Raises:
        BenchError: a server failed.
    """
    stock, pic = build_arms(["stock", "pic"], server_args=common, pic_config=_CONFIG)
    pic = _with_probe(pic, _AS_WITH_DRAFT)
    draft = {arm.name: _with(arm, flags) for arm in (stock, pic)}
    (own,) = build_arms(["pic"], server_args=[*common, *flags], pic_config=_OWN_CHUNKS)
    twice = _answers(
        model, _with_probe(own, _IGNORE_PREFIX), [prompt for prompt in prompts for _ in range(2)], max_tokens, logs
    )
    return SetupResult(
        model=Path(model).name,
        flags=shlex.join(flags),
        stock=_answers(model, stock, prompts, max_tokens, logs),
        stock_draft=_answers(model, draft["stock"], prompts, max_tokens, logs),
        pic=_answers(model, pic, prompts, max_tokens, logs),
        pic_draft=_answers(model, draft["pic"], prompts, max_tokens, logs),
        shift_zero=twice[1::2],
    )


def _with(arm: Arm, flags: Sequence[str]) -> Arm:
    return msgspec.structs.replace(arm, server_args=(*arm.server_args, *flags))


def _with_probe(arm: Arm, switches: str) -> Arm:
    return msgspec.structs.replace(arm, env={**arm.env, PROBE_VARIABLE: switches})


def _answers(model: str, arm: Arm, prompts: Sequence[str], max_tokens: int, logs: Path) -> list[Answer]:
    port = free_port()
    command = launch_command(model, port, arm.server_args)
    with Server(command, port=port, log_path=logs / f"{port}.log", env=arm.env) as server, server.watch():
        label = f"{Path(model).name} {shlex.join(arm.server_args)}"
        return [_ask(server, prompt, max_tokens) for prompt in tqdm(prompts, label, mininterval=10.0)]


def _ask(server: Server, prompt: str, max_tokens: int) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    answer: dict[str, Any] = server.post("/generate", {"text": prompt, "sampling_params": sampling})
    meta = answer["meta_info"]
    return Answer(
        tokens=answer["output_ids"],
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        spliced_tokens=(meta.get("cached_tokens_details") or {}).get("pic", 0),
        num_verified=meta.get("spec_verify_ct", 0),
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
        sum(one.tokens == other.tokens for one, other in zip(*pair, strict=True))
        for pair in ((result.stock, result.stock_draft), (result.pic, result.pic_draft))
    ]
    alike = sum(
        (one.tokens, one.num_verified) == (other.tokens, other.num_verified)
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
    return sum(len(answer.tokens) - 1 for answer in answers) / verified


if __name__ == "__main__":
    sys.exit(main())
