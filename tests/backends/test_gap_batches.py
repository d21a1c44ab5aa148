"""SGLang's production attention backends on gap batches: their own classes and metadata, without their kernels.

A worker process has the classes over plain PyTorch in the place of the compiled kernels, and Triton's kernels in the
interpreter. Each answer is compared with dense causal attention in float64, and a decode pass follows on the same rows.
"""

from __future__ import annotations

import os
import re
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest

from tests.backends.cases import CASES, MUTATIONS, Comparison
from tests.conftest import ROOT
from tests.helpers.workers import collect_nothing

if find_spec("sglang") is None:
    pytest.skip("no SGLang", allow_module_level=True)


class Subject(NamedTuple):
    """A backend, and what it is compared on."""

    backend: str
    shape: str
    dtype: str = "float32"
    pages: tuple[int, ...] = (1, 16, 64)
    cases: tuple[str, ...] = tuple(CASES)

    @property
    def tolerance(self) -> float:
        """Largest absolute difference of outputs that are about 1."""
        return {"float32": 5e-6, "bfloat16": 2e-2}[self.dtype]

    @property
    def batches(self) -> list[tuple[int, str]]:
        """Every case at every page size."""
        return [*product(self.pages, self.cases)]

    @property
    def quick(self) -> list[tuple[int, str]]:
        """In the interpreter every page size once and every case once, but for the one that takes a quarter minute."""
        if self.backend != "triton":
            return self.batches
        return [pair for pair in zip(self.pages, self.cases, strict=True) if pair[1] != "many_gaps"]

    def __str__(self) -> str:
        return f"{self.backend}-{self.shape}-{self.dtype}"


# A program of the interpreter takes a millisecond.
_SHORT = ("gap_of_one", "beside_plain", "beside_decode")

SUBJECTS = [
    Subject("fa3", "gqa"),
    Subject("fa3", "gqa", "bfloat16"),
    Subject("fa3", "mla"),
    Subject("fa3", "gemma", pages=(16,)),
    Subject("fa3", "gpt-oss", pages=(1,)),
    # Mixed batches are refused: in these it forgets the chunks.
    Subject("fa3", "llama4", pages=(16,), cases=tuple(name for name, case in CASES.items() if not case.is_mixed)),
    Subject("fa3", "unlimited-ocr", pages=(1,), cases=("beside_plain",)),
    # As on SM100, where SGLang chooses it for models with windows.
    Subject("fa4", "gqa", "bfloat16", pages=(128,)),
    Subject("fa4", "gpt-oss", pages=(128,)),
    Subject("flashinfer", "gqa"),
    Subject("flashinfer", "gemma", pages=(16,)),
    Subject("flashinfer@mla", "mla"),
    Subject("triton", "gqa", cases=_SHORT),
    Subject("triton", "gqa", pages=(16,), cases=("many_gaps",)),
    Subject("triton", "mla", pages=(1, 16), cases=("gap_of_one", "beside_decode")),
    Subject("triton", "gemma", pages=(16,), cases=("beside_decode",)),
    Subject("triton", "gpt-oss", pages=(1,), cases=("beside_decode",)),
    Subject("trtllm_mha", "gqa"),
    Subject("trtllm_mha", "gpt-oss", pages=(16,)),
    # In half precision trailing gaps of one token go through the kernel for decoding.
    Subject("trtllm_mha", "gqa", "bfloat16"),
]

Ask = Callable[..., Comparison]


def start() -> None:
    """What the worker does first: Triton reads the variable when it is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    collect_nothing()
    import torch

    torch.set_num_threads(1)


def compare(*what: Any) -> Comparison:
    """As in `comparison.py`, which nobody but the worker imports."""
    from tests.backends import comparison

    return comparison.compare(*what)


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Has the worker make one comparison."""
    with ProcessPoolExecutor(1, get_context("spawn"), start) as worker:

        def ask(subject: Subject, page_size: int, case: str, mutation: str | None = None) -> Comparison:
            what = (subject.backend, subject.shape, page_size, case, mutation, subject.dtype)
            return worker.submit(compare, *what).result()

        yield ask


def _rounds() -> list[Any]:
    """What runs with every commit, and what of the interpreter's is left."""
    rounds = []
    for subject in SUBJECTS:
        if subject.quick:
            rounds.append(pytest.param(subject, subject.quick, id=f"{subject}"))
        if rest := [pair for pair in subject.batches if pair not in subject.quick]:
            rounds.append(pytest.param(subject, rest, id=f"{subject}-rest", marks=pytest.mark.slow))
    return rounds


@pytest.mark.parametrize(("subject", "batches"), _rounds())
def test_gap_batches_are_dense_attention(ask: Ask, subject: Subject, batches: list[tuple[int, str]]) -> None:
    """Several requests, with runs and without, prefixes and gaps of any length, before and beside decoding."""
    for page_size, case in batches:
        answer = ask(subject, page_size, case)
        assert answer.error <= subject.tolerance, (case, page_size, answer)
        assert answer.decode_error <= subject.tolerance, (case, page_size, answer)
        assert answer.sequences >= CASES[case].num_gaps


def test_the_matrix_says_how_many_gap_batches_ran() -> None:
    """For every backend that start-up admits and that is compared here."""
    ran: Counter[str] = Counter()
    for subject in SUBJECTS:
        ran[subject.backend.partition("@")[0]] += len(subject.batches)
    table = tomllib.loads((ROOT / "sglang_pic/adapter/support.toml").read_text())
    said = {
        name: int(found[1])
        for name, reason in table["tested"]["attention"].items()
        if (found := re.match(r"(\d+) gap batches", reason))
    }
    assert said == {name: ran[name] for name in ("fa3", "flashinfer", "triton")}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("subject", [subject for subject in SUBJECTS if len(subject.cases) > 1], ids=str)
def test_a_wrong_gap_batch_is_noticed(ask: Ask, subject: Subject, mutation: str) -> None:
    """By far: no rounding looks like it."""
    is_interpreted = subject.backend == "triton"
    case = "beside_plain" if "beside_plain" in subject.cases and not is_interpreted else "beside_decode"
    answer = ask(subject, 16, case, mutation)
    assert answer.error > 2 * subject.tolerance, answer
