"""KL of one next-token distribution from another."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_pic.runtime.divergence import kl_and_differs


def test_two_tokens_by_hand() -> None:
    kl, differs = kl_and_differs(torch.tensor([math.log(3.0), 0.0]), torch.tensor([0.0, math.log(3.0)]))
    assert kl.item() == pytest.approx(0.75 * math.log(3) - 0.25 * math.log(3))
    assert differs.item() == 1


def test_equal_distributions_differ_by_nothing_and_a_constant_changes_none() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    kl, differs = kl_and_differs(logits, logits + 3)
    assert abs(kl.item()) < 1e-7
    assert differs.item() == 0


def test_tokens_that_are_ruled_out_add_nothing() -> None:
    logits, other = torch.tensor([1.0, 2.0, -math.inf]), torch.tensor([2.0, 1.0, -math.inf])
    kl, _ = kl_and_differs(logits, other)
    assert kl.item() == pytest.approx(kl_and_differs(logits[:2], other[:2])[0].item())


def test_what_is_ruled_out_wrongly_is_infinitely_far_and_what_is_no_number_stays_none() -> None:
    assert kl_and_differs(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -math.inf]))[0].item() == math.inf
    assert kl_and_differs(torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan]))[0].isnan()
