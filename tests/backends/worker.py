"""Comparisons in a process of their own, which has SGLang's backends over reference kernels."""

from __future__ import annotations

import os
import warnings

from tests.backends.cases import Comparison


def start() -> None:
    """What the process does first: Triton reads the variable when it is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)


def compare(backend: str, shape: str, page_size: int, case: str, dtype: str, mutation: str | None) -> Comparison:
    """As in `comparison.py`, which nobody but the process imports."""
    from tests.backends import comparison

    return comparison.compare(backend, shape, page_size, case, mutation, dtype)
