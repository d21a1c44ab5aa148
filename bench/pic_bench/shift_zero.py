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

from pic_bench.compare.arms import build_arms
from pic_bench.compare.server import Server
from pic_bench.frame import Finding, Result, Study, at_least, result_of
from pic_bench.report.markdown import Table
from pic_bench.report.stats import top_k_kl
from pic_bench.serving import generate, prompt_texts, serving
from sglang_pic.errors import BenchError

_CONFIG = '{"cost_gate": "off", "self_test": "off"}'
_PROBE = {"ignore_prefix": True}
_MIN_REUSED_SHARE = 0.8


class Difference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the second answer to a prompt is from the first, over prompts."""

    prompts: int
    kl_mean: float
    kl_max: float
    """KL in nats of the first token, over the first answer's top 20 and one bin for the rest."""
    top1_agreement: float
    answer_agreement: float


class SetupResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one topology: `spliced` is the plugin's difference, `exact_hit` stock SGLang's own."""

    model: str
    """The name of its folder."""
    tp_size: int
    page_size: int
    dtype: str
    spliced: Difference
    exact_hit: Difference


class ShiftZero(Result, frozen=True, kw_only=True):
    """The result file."""

    prompts: int
    prompt_tokens: int
    seed: int
    setups: list[SetupResult]


STUDY = Study("shift_zero", __doc__, seed=0)
FORM = "MODEL:TP:PAGE:DTYPE"
STUDY.add("--setup", action="append", required=True, metavar=FORM, help="e.g. .models/smollm2:1:1:float32; may repeat")
STUDY.add("--prompts", type=at_least(1), default=20, metavar="N", help="prompts of each setup")
STUDY.add("--prompt-tokens", type=at_least(1), default=500, metavar="N", help="about this many each")


@STUDY.measures
def main(args: argparse.Namespace, logs: Path) -> Finding:
    """Measure every setup; 1 where a server failed or served nothing from its cache."""
    setups = [_parse(text) for text in args.setup]
    prompts = seeded_prompts(args.prompts, args.prompt_tokens, args.seed)
    result = result_of(ShiftZero, args, setups=[_measure(*setup, prompts, logs) for setup in setups])
    return Finding(result, _table(result.setups))


def _parse(text: str) -> tuple[str, int, int, str]:
    match text.rsplit(":", 3):
        case [model, tp_size, page_size, dtype] if tp_size.isdigit() and page_size.isdigit():
            return model, int(tp_size), int(page_size), dtype
    raise BenchError(f"--setup {text!r}: must be {FORM}, e.g. .models/smollm2:1:16:bfloat16.")


def seeded_prompts(count: int, num_tokens: int, seed: int) -> list[str]:
    """Seeded text that shares nothing from prompt to prompt."""
    return prompt_texts(f"gen:random?calls=1&sessions={count}&prompt={num_tokens}&seed={seed}")


def _measure(model: str, tp_size: int, page_size: int, dtype: str, prompts: Sequence[str], logs: Path) -> SetupResult:
    """Both servers, started one after the other; every prompt goes to each twice."""
    flags = ["--tp-size", str(tp_size), "--page-size", str(page_size), "--dtype", dtype]
    found = {}
    for arm in build_arms(["stock", "pic"], server_args=flags, pic_config=_CONFIG):
        with serving(model, arm, logs, probe=None if arm.kind.is_stock else _PROBE) as server:
            found["exact_hit" if arm.kind.is_stock else "spliced"] = repeat_prompts(server, prompts)
    return SetupResult(model=Path(model).name, tp_size=tp_size, page_size=page_size, dtype=dtype, **found)


def repeat_prompts(server: Server, prompts: Sequence[str]) -> Difference:
    """Send each prompt twice to a server that has seen none of them, and compare the answers.

    Raises:
        BenchError: the server failed, or served an equal prompt without its cache.
    """
    pairs = [(generate(server, prompt), generate(server, prompt)) for prompt in prompts]
    kls = []
    for cold, again in pairs:
        if again.cached_tokens < _MIN_REUSED_SHARE * again.prompt_tokens:
            raise BenchError(f"{server.base_url}: an equal prompt was not served from the cache: {again}")
        kl = top_k_kl(cold.first, again.first)
        assert kl is not None, "an answer has the likeliest tokens"
        kls.append(kl)
    return Difference(
        prompts=len(kls),
        kl_mean=float(np.mean(kls)),
        kl_max=max(kls),
        top1_agreement=float(np.mean([cold.ids[0] == again.ids[0] for cold, again in pairs])),
        answer_agreement=float(np.mean([cold.ids == again.ids for cold, again in pairs])),
    )


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
