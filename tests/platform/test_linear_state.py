"""The platform's gated delta rule against transformers' functions in torch, at once and cut in passes."""

from __future__ import annotations

import pytest
import torch
from pic_platform import linear_state, torchvision_shim

torchvision_shim.install()

from transformers.models.qwen3_next import modeling_qwen3_next as theirs  # noqa: E402

K_HEADS, V_HEADS, K_DIM, V_DIM, WIDTH = 2, 4, 8, 6, 4
SLOTS = torch.tensor([3, 1])
CUTS = [[70, 130], [64, 64], [1, 200], [63, 2]]
"""The tokens of two sequences."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def drawn(num_tokens: int) -> dict[str, torch.Tensor]:
    """What a layer hands over for `num_tokens` of all sequences."""
    a, b, log, bias = torch.randn(num_tokens, V_HEADS), torch.randn(num_tokens, V_HEADS), torch.rand(4), torch.randn(4)
    g, beta = linear_state.gates(log, a, b, bias)
    assert torch.allclose(g[0], -log.exp() * torch.nn.functional.softplus(a + bias))
    assert torch.allclose(beta[0], b.sigmoid())
    q, k = (torch.randn(1, num_tokens, K_HEADS, K_DIM) for _ in "qk")
    return {"q": q, "k": k, "v": torch.randn(1, num_tokens, V_HEADS, V_DIM), "g": g, "beta": beta}


def expected(inputs: dict[str, torch.Tensor], span: slice, state: torch.Tensor, rule: str) -> list[torch.Tensor]:
    """Transformers' answer for one sequence; its states have the dimension of keys first."""
    q, k = (inputs[name][:, span].repeat_interleave(V_HEADS // K_HEADS, dim=2) for name in "qk")
    v, g, beta = (inputs[name][:, span] for name in ("v", "g", "beta"))
    read, last = getattr(theirs, f"torch_{rule}_gated_delta_rule")(
        q, k, v, g=g, beta=beta, initial_state=state.mT[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return [read[0], last[0].mT]


@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize("rule", ["chunk", "recurrent"])
def test_new_tokens_are_read_and_written_as_by_transformers(lengths: list[int], rule: str) -> None:
    inputs, states = drawn(sum(lengths)), torch.randn(5, V_HEADS, V_DIM, K_DIM)
    before = states.clone()
    bounds = torch.tensor([0, lengths[0], sum(lengths)])
    read, *_ = linear_state.extend(None, **inputs, ssm_states=states, cache_indices=SLOTS, query_start_loc=bounds)
    for start, end, slot in zip(bounds, bounds[1:], SLOTS, strict=False):
        found, last = expected(inputs, slice(int(start), int(end)), before[slot], rule)
        assert torch.allclose(read[0, start:end], found, atol=1e-4)
        assert torch.allclose(states[slot], last, atol=1e-4)
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.parametrize("lengths", CUTS)
def test_the_states_before_each_chunk_are_those_of_shorter_passes(lengths: list[int]) -> None:
    """SGLang numbers the chunks of a batch one sequence after the other."""
    inputs, states = drawn(sum(lengths)), torch.randn(5, V_HEADS, V_DIM, K_DIM)
    before, starts = states.clone(), [0, lengths[0], sum(lengths)]
    *_, found = linear_state.extend(
        None, **inputs, ssm_states=states, cache_indices=SLOTS, query_start_loc=torch.tensor(starts)
    )
    told = []
    for start, length, slot in zip(starts, lengths, SLOTS, strict=False):
        for done in range(0, length, 64):
            short, other = {name: each[:, start : start + done] for name, each in inputs.items()}, before.clone()
            linear_state.extend(
                None, **short, ssm_states=other, cache_indices=slot[None], query_start_loc=torch.tensor([0, done])
            )
            told.append(other[slot])
    assert torch.equal(found[0], torch.stack(told))
