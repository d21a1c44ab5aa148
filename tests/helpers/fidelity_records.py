"""Records of a fidelity run that was never made, and a stand-in for its server, for the tests of fidelity and tune."""

from __future__ import annotations

import argparse
import shlex
from typing import NamedTuple

import numpy as np
from pic_bench.fidelity.arms import Arm
from pic_bench.fidelity.command import add_arguments, config_of
from pic_bench.fidelity.config import Config
from pic_bench.fidelity.record import Probe
from pic_bench.fidelity.target import Recorded

CONTROLS = dict.fromkeys(("full", "retest", "exact"), 0.0)


def parse(line: str = "") -> Config:
    """What the command makes of these arguments."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_of(parser.parse_args(shlex.split(f"--model m --out o {line}")))


def probe(**fields: object) -> Probe:
    """A record of a call of a trace; `fields` replace what it says."""
    asked = {"dtype": "float32", "prompt": "p0", "source": "sample"}
    tokens = {"prompt_tokens": 300, "prefix_hit_tokens": 0, "chunk_hit_tokens": 71}
    figures = {"top1_probability": 0.6, "kl": 0.01, "cosine": 0.99, "top1_agrees": True}
    values = {**asked, **tokens, **figures, "arm": "default"}
    defaults = {"chunk_hit_tokens": 0} if fields.get("arm") in CONTROLS else {}
    return Probe(**{**values, **defaults, **fields})


class Asked(NamedTuple):
    """What a stand-in for the server was asked to record."""

    prompt: list[int]
    gold: list[int]
    arm: Arm
    key: str


class StandIn:
    """Stands for the server: notes what it is asked, and splices half of every prompt but for controls.

    Args:
        prefix: prefix hit tokens of every request.
    """

    def __init__(self, *, prefix: int = 0, vocab: int = 200) -> None:
        self.prefix, self.vocab = prefix, vocab
        self.asked: list[Asked] = []

    def record(self, prompt: list[int], gold: list[int], arm: Arm, *, key: str) -> Recorded:
        """One request of the experiments."""
        self.asked.append(Asked(prompt, gold, arm, key))
        return self.answer(self.asked[-1])

    def answer(self, asked: Asked) -> Recorded:
        """What is recorded of a request."""
        hits = 0 if asked.arm.is_control else len(asked.prompt) // 2
        return recorded(prefix=self.prefix, hits=hits, positions=len(asked.gold) + 1, vocab=self.vocab)


def recorded(*, prefix: int = 0, hits: int = 0, positions: int = 1, vocab: int = 200) -> Recorded:
    """A recorded request whose logits are 0."""
    return Recorded(np.zeros((positions, vocab), np.float32), prefix, hits)
