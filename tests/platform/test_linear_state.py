"""The platform's gated delta rule against transformers' functions in torch, at once and cut in passes."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_states_are_copied_to_the_slots_that_track_them() -> None:
    conv, states = torch.randn(3, 5, 6, 3), torch.randn(3, 5, 2, 4, 4)
    told = [each.clone() for each in (conv, states)]
    for each in told:
        each[:, 4] = each[:, 1]
    where = SLOTS, torch.tensor([False, True]), torch.tensor([0, 4]), 2
    alone = [each.clone() for each in (conv, states)]
    linear_state.track(conv, states, *where, dim=1)
    assert all(map(torch.equal, (conv, states), told))
    for layer in range(3):
        linear_state.track(alone[0][layer], alone[1][layer], *where)
    assert all(map(torch.equal, alone, told))


def test_a_step_is_a_pass_of_one_token() -> None:
    log, bias = torch.rand(V_HEADS), torch.randn(V_HEADS)
    a, b = torch.randn(2, V_HEADS), torch.randn(2, V_HEADS)
    q, k, v = torch.randn(1, 2, K_HEADS, K_DIM), torch.randn(1, 2, K_HEADS, K_DIM), torch.randn(1, 2, V_HEADS, V_DIM)
    states = torch.randn(5, V_HEADS, V_DIM, K_DIM)
    other = states.clone()
    read = linear_state.decode(None, q, k, v, a, b, A_log=log, dt_bias=bias, ssm_states=states, cache_indices=SLOTS)
    g, beta = linear_state.gates(log, a, b, bias)
    passed, *_ = linear_state.extend(
        None, q, k, v, g, beta, ssm_states=other, cache_indices=SLOTS, query_start_loc=torch.tensor([0, 1, 2])
    )
    assert torch.allclose(read, passed, atol=1e-5)
    assert torch.allclose(states, other, atol=1e-5)


@pytest.mark.parametrize("lengths", [[5, 9], [1, 2], [3, 1]])
def test_a_convolution_goes_on_from_its_slot(lengths: list[int]) -> None:
    channels = 10
    weight, x = torch.randn(channels, WIDTH), torch.randn(channels, sum(lengths))
    states = torch.randn(5, channels, WIDTH - 1)
    before, goes_on = states.clone(), torch.tensor([True, False])
    found = linear_state.convolve(x, weight, None, states, torch.tensor([]), lengths, SLOTS, goes_on)
    for part, has_state, slot, out in zip(x.split(lengths, 1), goes_on, SLOTS, found.split(lengths, 1), strict=True):
        inputs = torch.cat([before[slot] * has_state, part], dim=1)
        told = torch.nn.functional.conv1d(inputs[None], weight[:, None], groups=channels)[0]
        assert torch.allclose(out, torch.nn.functional.silu(told), atol=1e-6)
        assert torch.equal(states[slot], inputs[:, -3:])
    step, again = torch.randn(2, channels), states.clone()
    stepped = linear_state.convolve_step(step, states, weight, None, "silu", conv_state_indices=SLOTS)
    told = theirs.causal_conv1d_update(step[:, :, None], again[SLOTS], weight, None, "silu")
    assert torch.allclose(stepped, told[:, :, 0], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_norm_is_transformers(dtype: torch.dtype) -> None:
    norm = theirs.Qwen3NextRMSNormGated(V_DIM).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
        x, gate = torch.randn(7, V_DIM).to(dtype), torch.randn(7, V_DIM).to(dtype)
        ours = SimpleNamespace(weight=norm.weight, eps=norm.variance_epsilon, activation="silu")
        assert torch.equal(linear_state.norm_gated(ours, x, gate), norm(x, gate))


def test_the_shared_expert_is_added_through_its_gate() -> None:
    hidden, weight, shared, routed = torch.randn(3, 5), torch.randn(5), torch.randn(3, 5), torch.randn(3, 5)
    told = routed + shared * torch.nn.functional.linear(hidden, weight[None]).sigmoid()
    linear_state.add_gated(hidden, weight, shared, routed)
    assert torch.allclose(routed, told, atol=1e-6)


def test_projections_are_taken_apart_by_head_of_the_keys() -> None:
    per = V_HEADS // K_HEADS
    parts = [torch.randn(3, K_HEADS, size) for size in (K_DIM, K_DIM, per * V_DIM, per * V_DIM)]
    both = [torch.randn(3, K_HEADS, per) for _ in "ba"]
    mixed, z, b, a = linear_state.split_projections(
        torch.cat(parts, dim=2).flatten(1), torch.cat(both, dim=2).flatten(1), K_HEADS, V_HEADS, K_DIM, V_DIM
    )
    assert torch.equal(mixed, torch.cat([part.flatten(1) for part in parts[:3]], dim=1))
    assert torch.equal(z, parts[3].view(3, V_HEADS, V_DIM))
    assert [torch.equal(found, given.flatten(1)) for found, given in zip((b, a), both, strict=True)] == [True, True]
