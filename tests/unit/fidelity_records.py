"""Seeded records of a fidelity run that was never made, for the report's tests: sizes and directions are invented."""

from __future__ import annotations

import argparse
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from pic_bench.fidelity.arms import Arm
from pic_bench.fidelity.command import _config, add_arguments
from pic_bench.fidelity.config import Config
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.target import Recorded

CONTROLS = dict.fromkeys(("full", "retest", "exact"), 0.0)
SEAMS = (1, 2, 4, 8, 16, 32)
POLICIES = {"default": 0.45, "seam-8": 0.5, "seam-32": 0.62, "min-run-256": 0.7, "seam-8-min-128": 0.55}


def parse(line: str = "") -> Config:
    """What the command makes of these arguments."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return _config(parser.parse_args(shlex.split(f"--model m --out o {line}")))


def probe(**fields: object) -> Probe:
    """A record of a grid prompt with one block; `fields` replace what it says."""
    values: dict[str, object] = {
        "experiment": Experiment.GRID,
        "dtype": "float32",
        "prompt": "p0",
        "source": "sample",
        "arm": "seam-1",
        "num_blocks": 1,
        "donors": Donors.ISOLATED,
        "shift": None,
        "prompt_tokens": 300,
        "prefix_hit_tokens": 0,
        "chunk_hit_tokens": 71,
        "top1_probability": 0.6,
        "kl": 0.01,
        "cosine": 0.99,
        "top1_agrees": True,
    }
    defaults = {"donors": Donors.NONE, "chunk_hit_tokens": 0} if fields.get("arm") in CONTROLS else {}
    return Probe(**{**values, **defaults, **fields})  # type: ignore[arg-type]


class Asked(NamedTuple):
    """What a stand-in for the server was asked to record."""

    prompt: list[int]
    gold: list[int]
    arm: Arm
    key: str
    donors_from: str | None


class StandIn:
    """Stands for the server: notes what it is asked, and splices half of every prompt but for controls.

    Args:
        prefix: prefix hit tokens of every request.
    """

    def __init__(self, *, prefix: int = 0, vocab: int = 200) -> None:
        self.prefix, self.vocab = prefix, vocab
        self.asked: list[Asked] = []

    def record(
        self, prompt: list[int], gold: list[int], arm: Arm, *, key: str, donors_from: str | None, keys: bool
    ) -> Recorded:
        """One request of the experiments."""
        assert not keys
        self.asked.append(Asked(prompt, gold, arm, key, donors_from))
        return self.answer(self.asked[-1])

    def answer(self, asked: Asked) -> Recorded:
        """What is recorded of a request."""
        hits = 0 if asked.arm.is_control else len(asked.prompt) // 2
        return recorded(prefix=self.prefix, hits=hits, positions=len(asked.gold) + 1, vocab=self.vocab)


def recorded(
    spliced: Sequence[tuple[int, int]] = (),
    *,
    prefix: int = 0,
    hits: int | None = None,
    positions: int = 1,
    vocab: int = 200,
) -> Recorded:
    """A recorded request whose logits are 0; its chunk hit is what was spliced, where `hits` does not say otherwise."""
    return Recorded(
        logits=np.zeros((positions, vocab), dtype=np.float32),
        spliced=list(spliced),
        keys=None,
        prefix_hit_tokens=prefix,
        chunk_hit_tokens=sum(end - start for start, end in spliced) if hits is None else hits,
    )


def grid(prompts: int = 40, blocks: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Iterator[Probe]:
    """Both dtypes and kinds of donors."""
    rng = random.Random(7)
    for dtype, num_blocks, number in product(("float32", "bfloat16"), blocks, range(prompts)):
        common = {"dtype": dtype, "num_blocks": num_blocks, "prompt": f"grid-{num_blocks}-{number}"}
        common |= {"top1_probability": rng.betavariate(3, 2), "prompt_tokens": 150 + 80 * num_blocks}
        yield from _measured(rng, {**CONTROLS, "exact": 1e-12 if dtype == "float32" else 4e-5}, **common)
        hardness = rng.lognormvariate(0, 0.8)
        for donors, scale in ((Donors.ISOLATED, 4e-3), (Donors.CONTEXT, 1.5e-3)):
            base = scale * hardness * num_blocks**0.6
            kls = {"naive": 30 * base, "seam-0": 1.6 * base} | {f"seam-{seam}": base / seam**0.35 for seam in SEAMS}
            yield from _measured(rng, kls, donors=donors, chunk_hit_tokens=70 * num_blocks, **common)


def shifts(prompts: int = 24) -> Iterator[Probe]:
    """One block moved, in float32."""
    rng = random.Random(8)
    for shift, number in product((1, 16, 64, 256, 1024, 4096), range(prompts)):
        common = {"experiment": Experiment.SHIFT, "shift": shift, "prompt": f"shift-{shift}-{number}"}
        common |= {"prompt_tokens": 400 + shift, "top1_probability": rng.betavariate(3, 2)}
        kls = {"full": 0.0, "exact": 1e-12, "naive": 0.004 * shift**0.5, "seam-1": 0.004}
        yield from _measured(rng, kls, **common)


def questions(prompts: int = 30) -> Iterator[Probe]:
    """Two sets of questions, one of them beyond the model, in bfloat16."""
    rng = random.Random(9)
    for (source, skill), number in product((("kv-retrieval", 0.8), ("musique <cut>", 0.05)), range(prompts)):
        common = {"experiment": Experiment.QA, "dtype": "bfloat16", "source": source, "num_blocks": 4 + number % 3}
        common |= {"prompt": f"{source}-{number}-0", "top1_probability": rng.betavariate(4, 2)}
        for arm, kl, kept in (("full", 0.0, 1), ("exact", 1e-5, 1), ("default", 6e-3, 0.95), ("naive", 0.4, 0.5)):
            score = float(rng.random() < skill * kept)
            donors = Donors.NONE if arm in CONTROLS else Donors.CONTEXT
            yield from _measured(rng, {arm: kl}, score=score, exact_match=score == 1, donors=donors, **common)


def trace(calls: int = 90) -> Iterator[Probe]:
    """The calls of a trace under policies, two thirds of them with many chunk-hit tokens."""
    rng = random.Random(10)
    for call in range(calls):
        tokens, hits = rng.randrange(2000, 9000), 0 if call % 3 == 0 else rng.randrange(300, 1500)
        common = {"experiment": Experiment.TRACE, "dtype": "bfloat16", "source": "opendevin", "num_blocks": None}
        common |= {"prompt": f"{call // 6:03}-{call % 6:03}", "prompt_tokens": tokens}
        common |= {"top1_probability": min(0.99, max(0.02, rng.gauss(0.5, 0.2)))}
        yield from _measured(rng, {"full": 0.0, "retest": 0.0}, **common)
        common["prefix_hit_tokens"] = tokens - hits - rng.randrange(200, 600)
        yield from _measured(rng, {"exact": 2e-5}, **common)
        for policy, share in POLICIES.items():
            spliced = int(hits * (1.25 - share))
            kl = 8e-3 * (1 - share) ** 2 if spliced else 2e-5
            yield from _measured(rng, {policy: kl}, donors=Donors.TRACE, chunk_hit_tokens=spliced, **common)


def _measured(rng: random.Random, kls: Mapping[str, float], **fields: object) -> Iterator[Probe]:
    """A record for every arm, with a KL about the given one; its other metrics go with it."""
    for arm, about in kls.items():
        kl = about * rng.lognormvariate(0, 0.5)
        agrees = rng.random() >= (0.0 if kl < 1e-9 else min(0.6, 0.8 * kl**0.5))
        yield probe(
            arm=arm,
            kl=kl,
            top1_agrees=agrees,
            forced_kl=kl * rng.uniform(0.7, 1.1),
            gold_nll=2.4 + kl * rng.uniform(-0.2, 0.6),
            greedy_tokens=64,
            agreed_tokens=rng.randrange(int(agrees), 65) if kl else 64,
            key_error=None if arm in CONTROLS else 0.02 + kl,
            text=f"… the red box holds a `{arm}` <b>\n[full prefill] of tin\n[this] of lead",
            **fields,
        )
