"""Does a splice by itself add an error? A prompt served by its own chunks, against a full prefill.

The probe's switch `ignore_prefix` throws exact prefix hits away, so the second of two equal prompts is spliced at
shift 0 in its own context. Beside it stands what stock SGLang does to itself: the same prompt cold, then as an exact
prefix hit. In float32 both should be exact; in bf16 the splice should be no further off than the hit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from pic_traces.source import load

from pic_bench.compare.arms import Arm, build_arms
from pic_bench.compare.command import with_servers
from pic_bench.compare.server import Server, free_port, launch_command
from pic_bench.environment import Environment, capture_environment
from pic_bench.out_folder import write_json
from pic_bench.probe_plugin import PROBE_VARIABLE
from pic_bench.report.markdown import Table, markdown_table
from pic_bench.report.stats import top_k_kl
from sglang_pic.errors import BenchError

_CONFIG = '{"cost_gate": "off", "self_test": "off"}'
_PROBE = '{"ignore_prefix": true}'
_MIN_REUSED_SHARE = 0.8


class Difference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the second answer to a prompt is from the first, over prompts."""

    prompts: int
    kl_mean: float
    kl_max: float
    """KL in nats of the first token, over the first answer's top 20 and one bin for the rest."""
    top1_agreement: float
    answer_agreement: float


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: a model folder, its topology and its dtype."""

    model: str
    tp_size: int
    page_size: int
    dtype: str


class SetupResult(Setup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One setup: `spliced` is the plugin's difference, `exact_hit` stock SGLang's own."""

    spliced: Difference
    exact_hit: Difference


class ShiftZero(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result file."""

    schema_version: int = 1
    environment: Environment
    prompts: int
    prompt_tokens: int
    seed: int
    setups: list[SetupResult]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; 1 where a server failed or served nothing from its cache, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.shift_zero", description=__doc__.splitlines()[0])
    add, form = parser.add_argument, "MODEL:TP:PAGE:DTYPE"
    add("--setup", action="append", required=True, metavar=form, help="e.g. .models/smollm2:1:1:float32; may repeat")
    add("--prompts", type=int, default=20, help="prompts of each setup (default: 20)")
    add("--prompt-tokens", type=int, default=500, help="about this many each (default: 500)")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON there")
    args = parser.parse_args(argv)
    return with_servers("shift_zero", lambda logs: _run(args, logs))


def _run(args: argparse.Namespace, logs: Path) -> int:
    setups = [_parse(text) for text in args.setup]
    prompts = seeded_prompts(args.prompts, args.prompt_tokens, args.seed)
    results = [measure(setup, prompts, logs) for setup in setups]
    print(markdown_table(_table(results)))
    if args.out is not None:
        result = ShiftZero(
            environment=capture_environment(),
            prompts=args.prompts,
            prompt_tokens=args.prompt_tokens,
            seed=args.seed,
            setups=results,
        )
        write_json(args.out, result)
    return 0


def _parse(text: str) -> Setup:
    parts = text.rsplit(":", 3)
    if len(parts) != 4 or not (parts[1].isdigit() and parts[2].isdigit()):
        raise BenchError(f"--setup {text!r}: must be MODEL:TP:PAGE:DTYPE, e.g. .models/smollm2:1:16:bfloat16.")
    return Setup(model=parts[0], tp_size=int(parts[1]), page_size=int(parts[2]), dtype=parts[3])


def seeded_prompts(count: int, num_tokens: int, seed: int) -> list[str]:
    """Seeded text that shares nothing from prompt to prompt."""
    sessions = load(f"gen:random?calls=1&sessions={count}&prompt={num_tokens}&seed={seed}")
    return ["\n".join(str(m["content"]) for call in s.calls() for m in call.messages) for s in sessions]


def measure(setup: Setup, prompts: Sequence[str], logs: Path) -> SetupResult:
    """Start both servers, one after the other, and send every prompt twice to each.

    Raises:
        BenchError: a server failed, or served an equal prompt without its cache.
    """
    flags = ["--tp-size", str(setup.tp_size), "--page-size", str(setup.page_size), "--dtype", setup.dtype]
    stock, pic = build_arms(["stock", "pic"], server_args=flags, pic_config=_CONFIG)
    pic = msgspec.structs.replace(pic, env={**pic.env, PROBE_VARIABLE: _PROBE})
    spliced, exact_hit = (_twice(setup.model, arm, prompts, logs) for arm in (pic, stock))
    facts = msgspec.structs.asdict(setup) | {"model": Path(setup.model).name}
    return SetupResult(**facts, spliced=spliced, exact_hit=exact_hit)


def _twice(model: str, arm: Arm, prompts: Sequence[str], logs: Path) -> Difference:
    """Each prompt cold and then again, on a fresh server."""
    port = free_port()
    print(f"{Path(model).name} {' '.join(arm.server_args)}", file=sys.stderr)
    command = launch_command(model, port, arm.server_args)
    with Server(command, port=port, log_path=logs / f"{port}.log", env=arm.env) as server, server.watch():
        return repeat_prompts(server, prompts)


def repeat_prompts(server: Server, prompts: Sequence[str]) -> Difference:
    """Send each prompt twice to a server that has seen none of them, and compare the answers.

    Raises:
        BenchError: the server failed, or served an equal prompt without its cache.
    """
    pairs = [(_generate(server, prompt), _generate(server, prompt)) for prompt in prompts]
    kls = []
    for cold, again in pairs:
        if again["meta_info"]["cached_tokens"] < _MIN_REUSED_SHARE * again["meta_info"]["prompt_tokens"]:
            raise BenchError(f"{server.base_url}: an equal prompt was not served from the cache: {again['meta_info']}")
        kl = top_k_kl(_top(cold), _top(again))
        assert kl is not None, "top_logprobs_num asks for a list"
        kls.append(kl)
    return Difference(
        prompts=len(kls),
        kl_mean=float(np.mean(kls)),
        kl_max=max(kls),
        top1_agreement=float(np.mean([cold["output_ids"][0] == again["output_ids"][0] for cold, again in pairs])),
        answer_agreement=float(np.mean([cold["output_ids"] == again["output_ids"] for cold, again in pairs])),
    )


def _generate(server: Server, prompt: str) -> dict:
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 20,
    }
    return server.post("/generate", body)


def _top(answer: dict) -> dict[str, float]:
    return {str(entry[1]): entry[0] for entry in answer["meta_info"]["output_top_logprobs"][0]}


def _table(results: Sequence[SetupResult]) -> Table:
    header = ["model", "tp", "page", "dtype", "KL spliced: mean / max", "KL exact hit: mean / max"]
    rows = [
        [r.model, str(r.tp_size), str(r.page_size), r.dtype]
        + [f"{each.kl_mean:.1e} / {each.kl_max:.1e}" for each in (r.spliced, r.exact_hit)]
        + [f"{r.spliced.top1_agreement:.2f} / {r.exact_hit.top1_agreement:.2f}"]
        + [f"{r.spliced.answer_agreement:.2f} / {r.exact_hit.answer_agreement:.2f}"]
        for r in results
    ]
    return Table([*header, "top-1 spliced / hit", "answers spliced / hit"], rows)


if __name__ == "__main__":
    sys.exit(main())
