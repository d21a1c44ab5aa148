"""Serves the same prompts under every arm and writes one JSON line for each; says what each arm loses, by kind.

Every prompt that the full prefill answers right is served again with rows of earlier requests: under the policies, with
exact rows, with keys that are not rotated, with a second pass over what the question attends to, and with random
choice at the same cost. A run that was broken off goes on where it ended; several processes take kinds of their own,
in files of their own. It takes a CPU one to two minutes a prompt at 0.5B parameters, five times as long at 1.5B.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import msgspec
import torch
from pic_traces.encode import load_encoder

from pic_bench.fidelity.cases.text import ModelText
from pic_bench.out_folder import write_json
from pic_bench.paired.arms import POLICIES
from pic_bench.paired.cases import TRACE_TOKENS, Cases, in_turn
from pic_bench.paired.forward import Forward
from pic_bench.paired.measure import Measure
from pic_bench.paired.record import read
from pic_bench.paired.table import summary_of, table_of
from pic_bench.study_command import Finding, Study, progress
from sglang_pic.errors import BenchError

KINDS = ("order", "drawn", "tools", "copies", "gone", "fields", "sample:opendevin", "gen:compact", "gen:tool_variants")
LAYERS = {24: (9, 13, 16), 28: (14, 19, 22), 30: (18, 23, 28)}
"""By the number of layers, those whose attention finds a document: of Qwen2.5-Coder-0.5B, of its 1.5B, of SmolLM2."""


def _pool(words: str) -> tuple[str, list[str]]:
    """Kinds of `--together` and the name that they have as one."""
    name, _, kinds = words.partition("=")
    if not name or not all(kinds.split(",")):
        raise argparse.ArgumentTypeError(f"{words!r}: must be NAME=KIND,KIND")
    return name, kinds.split(",")


STUDY = Study("paired", __doc__, seed=0, has_out=False)
STUDY.options("quiet")
STUDY.add("records", type=Path, metavar="RECORDS", help="the JSON lines to write, or to go on with")
STUDY.add("--model", type=Path, metavar="FOLDER", help="a Qwen2 or Llama model; without it the records are shown")
STUDY.add(
    "--kind",
    action="append",
    metavar="KIND",
    help="order, drawn, tools, copies, gone, fields, again, compacted, cleared, a trace or gen:NAME; may repeat "
    "(default: the first six, sample:opendevin, gen:compact and gen:tool_variants)",
)
STUDY.add(
    "--data",
    type=Path,
    action="append",
    default=[],
    metavar="FILE",
    help="questions for order and drawn, beside the generated ones, and traces for tools, again, compacted and "
    "cleared; may repeat",
)
STUDY.add("--num", type=int, default=40, metavar="N", help="right prompts of each kind")
STUDY.add("--length", type=int, default=3, metavar="N", help="how many times the usual documents a prompt has, 1 to 4")
STUDY.add(
    "--dtype",
    choices=("float32", "bfloat16"),
    default="float32",
    help="of weights and rows; records of one file should have one (default: float32)",
)
STUDY.add(
    "--without",
    action="append",
    choices=[name for name in POLICIES if name not in ("seam-64", "most")],
    default=[],
    metavar="ARM",
    help="a policy that is not served; may repeat",
)
STUDY.add("--longest", type=int, default=TRACE_TOKENS, metavar="N", help="most tokens of a call of a trace")
STUDY.add("--threads", type=int, default=1, metavar="N", help="of PyTorch")
STUDY.add(
    "--together",
    action="append",
    default=[],
    type=_pool,
    metavar="NAME=KIND,KIND",
    help="judge some kinds of prompts as one, too; may repeat",
)
STUDY.add("--summary", type=Path, metavar="FILE", help="write the table there, as JSON")


@STUDY.measures
def main(args: argparse.Namespace, _logs: Path) -> Finding:
    """Serve the prompts without records, and show the table."""
    if args.model is not None:
        torch.set_num_threads(args.threads)
        _serve(args)
    records = read(args.records)
    there = sorted({each.kind for each in records})
    for name, kinds in args.together:
        if unknown := set(kinds).difference(there):
            raise BenchError(f"--together {name!r}: no records of {', '.join(sorted(unknown))}; there are {there}.")
        records += [
            msgspec.structs.replace(each, kind=name, prompt=f"{each.kind} {each.prompt}")
            for each in records
            if each.kind in kinds
        ]
    if args.summary is not None:
        write_json(args.summary, summary_of(records))
    return Finding(None, table_of(records))


def _serve(args: argparse.Namespace) -> None:
    """Add records of prompts that are not in the file, kinds in turn; one line says which prompt was not right."""
    text, encoder = ModelText(args.model), load_encoder(str(args.model))
    forward = Forward(args.model, getattr(torch, args.dtype))
    policies = {name: each for name, each in POLICIES.items() if name not in args.without}
    cases = Cases(args.model, policies, args.data, args.seed, args.length, args.longest, text, encoder)
    measure = Measure(forward, text, LAYERS.get(forward.num_layers, ()))
    wrong = args.records.with_suffix(".wrong")
    done = {(each.kind, each.prompt) for each in read(args.records)}
    right = Counter(kind for kind, _ in done)
    passed = {tuple(line.split("\t")) for line in wrong.read_text().splitlines()} if wrong.exists() else set()
    kinds = args.kind or KINDS
    prompts = in_turn(enumerate(cases.of(kind, 4 * args.num)) for kind in kinds)
    bar = progress(quiet=args.quiet, total=args.num * len(kinds), initial=sum(right.values()), unit="prompt")
    with bar, args.records.open("ab") as file, wrong.open("a") as passed_file:
        for number, prompt in prompts:
            key = (prompt.kind, prompt.name)
            if key in done or key in passed or right[prompt.kind] >= args.num:
                continue
            records = list(measure.records(prompt, number))
            if not records:
                passed_file.write("\t".join(key) + "\n")
                passed_file.flush()
                continue
            right[prompt.kind] += 1
            file.write(b"".join(msgspec.json.encode(each) + b"\n" for each in records))
            file.flush()
            bar.update()


if __name__ == "__main__":
    raise SystemExit(main())
