"""The conversion to MLA: what it promises of scores, values and lengths, and that readers of the checkpoint agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_pic.errors import ConfigError
from sglang_pic.models import checkpoint, mla_layer, smollm2_mla
from sglang_pic.models.mla_layer import GroupedAttention, MlaShape
from sglang_pic.models.perplexity import perplexity
from sglang_pic.platform import torchvision_shim
from tests.conftest import MODELS, ROOT

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 96, 6, 3, 8
NUM_IDLE = 16
"""Directions of the input that carry nothing."""
SHAPE = MlaShape(latent_rank=80, nope_dim=12, value_dim=16)
FREQS = 100.0 ** -(torch.arange(HEAD_DIM // 2).double() / (HEAD_DIM // 2))


def _draw_layer(seed: int = 0) -> GroupedAttention:
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64) / HIDDEN**0.5

    key, value = normal(2, NUM_KV_HEADS, HEAD_DIM, HIDDEN)
    key[..., -NUM_IDLE:] = value[..., -NUM_IDLE:] = 0.0
    return GroupedAttention(
        query=normal(NUM_HEADS, HEAD_DIM, HIDDEN), key=key, value=value, output=normal(HIDDEN, NUM_HEADS * HEAD_DIM)
    )


def _draw_inputs(num_tokens: int = 24) -> torch.Tensor:
    """Normalised inputs that hardly point into the last directions, which no key and no value asks for either."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_tokens, HIDDEN, generator=draw, dtype=torch.float64)
    inputs[:, -NUM_IDLE:] *= 1e-3
    return inputs / inputs.square().mean(-1, keepdim=True).sqrt()


def _gqa(layer: GroupedAttention, inputs: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """The original layer, written with real numbers and split halves."""
    angles = torch.arange(len(inputs))[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    query, key, value = (inputs @ heads.mT for heads in (layer.query, layer.key, layer.value))
    group = NUM_HEADS // NUM_KV_HEADS
    key, value = (heads.repeat_interleave(group, 0) for heads in (rotate(key), value))
    mixed = scaled_dot_product_attention(rotate(query), key, value, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ layer.output.T


def _mla(new: mla_layer.LatentAttention, inputs: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V2's layer: norm of the latent, interleaved pairs, one shared rotary key."""
    turns = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(len(inputs))[:, None] * freqs)

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    query = (inputs @ new.q_proj.T).unflatten(1, (NUM_HEADS, -1)).transpose(0, 1)
    latent, shared = (inputs @ new.kv_a_proj.T).split([SHAPE.latent_rank, HEAD_DIM], dim=-1)
    latent = latent / latent.square().mean(-1, keepdim=True).sqrt()
    expanded = (latent @ new.kv_b_proj.T).unflatten(1, (NUM_HEADS, -1)).transpose(0, 1)
    key, value = expanded.split([SHAPE.nope_dim, SHAPE.value_dim], dim=-1)
    shared = rotate(shared).expand(NUM_HEADS, -1, -1)
    query = torch.cat([query[..., : SHAPE.nope_dim], rotate(query[..., SHAPE.nope_dim :])], dim=-1)
    mixed = scaled_dot_product_attention(query, torch.cat([key, shared], dim=-1), value, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ new.o_proj.T


def _moments(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.T @ inputs / len(inputs)


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


def test_without_rotation_the_layer_is_the_same() -> None:
    """All algebra but the approximation: mixing and its inverse, the latent, the norm, scales and padding."""
    layer, inputs = _draw_layer(), _draw_inputs(200)
    new = mla_layer.convert(layer, _moments(inputs), SHAPE)
    still = torch.zeros_like(FREQS)
    assert new.missing_energy < 1e-5
    assert _error(_mla(new, inputs, still), _gqa(layer, inputs, still)) < 1e-5


def test_keys_of_one_direction_keep_their_rotation() -> None:
    """Where the heads' keys of a frequency are multiples of one another, one shared key says all: nothing is lost."""
    layer, inputs = _draw_layer(), _draw_inputs(200)
    first, second = layer.key[0].chunk(2)
    factors = [(1.0, 0.0), (0.5, -2.0), (-1.5, 0.3)]
    key = torch.stack([torch.cat([a * first - b * second, a * second + b * first]) for a, b in factors])
    layer = GroupedAttention(query=layer.query, key=key, value=layer.value, output=layer.output)
    new = mla_layer.convert(layer, _moments(inputs), SHAPE)
    assert _error(_mla(new, inputs, FREQS), _gqa(layer, inputs, FREQS)) < 1e-3
    assert _error(_mla(new, inputs, 0 * FREQS), _gqa(layer, inputs, FREQS)) > 0.05


def test_shared_key_is_the_best_one() -> None:
    """No other split that keeps one rotary key leaves less of the scores without rotation."""
    layer, inputs = _draw_layer(), _draw_inputs(200)
    moments = _moments(inputs).to(torch.complex128)
    query, key = (torch.complex(*heads.chunk(2, dim=-2)) for heads in (layer.query, layer.key))
    shared = mla_layer.share_keys(query, key, moments.real)

    def left(rest: torch.Tensor) -> float:
        total = 0.0
        for head, rows in enumerate(query):
            keys = torch.einsum("fj,jfh->fh", rest[:, head // 2], key)
            energies = [torch.einsum("fh,hg,fg->f", side, moments, side.conj()).real for side in (rows, keys)]
            total += float((energies[0] * energies[1]).sum())
        return total

    best = left(shared.rest)
    draw = torch.Generator().manual_seed(2)
    one = torch.eye(NUM_KV_HEADS, dtype=torch.complex128)
    for size in (0.02, 0.3):
        for _ in range(10):
            noise = size * torch.randn(2, *shared.mix.shape, generator=draw, dtype=torch.complex128)
            other = one - (shared.spread + noise[0])[..., :, None] * (shared.mix + noise[1])[..., None, :]
            assert left(other) > best


@pytest.mark.parametrize("shape", [(47, 12, 16), (80, 7, 16), (80, 12, 7)])
def test_shape_that_cannot_hold_the_layer_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="too small"):
        mla_layer.convert(_draw_layer(), _moments(_draw_inputs()), MlaShape(*shape))


def _small_llama() -> object:
    """A model whose KV heads have equal keys, so that its conversion loses nothing but what bf16 rounds away."""
    torchvision_shim.install()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=128, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0}, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.input_layernorm.weight, 0.5, 2.0)
        keys = layer.self_attn.k_proj.weight
        keys.data = keys.data[:HEAD_DIM].repeat(NUM_KV_HEADS, 1)
    return model


def test_checkpoint_is_read_as_the_same_model(tmp_path: Path) -> None:
    """Names, layout, configuration: transformers' DeepSeek-V2 on a whole model."""
    model = _small_llama()
    from transformers import AutoModelForCausalLM

    lines: list[str] = []
    tokens = torch.arange(3, 259).view(1, -1)[:, :120]
    shape = MlaShape(latent_rank=HIDDEN, nope_dim=12, value_dim=16)
    weights = smollm2_mla.convert_weights(model, smollm2_mla.collect_moments(model, [tokens[0]]), shape, lines.append)
    assert "outside its latent" in lines[-1]
    checkpoint.write(tmp_path, smollm2_mla._config(model.config, shape), weights)
    new, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert type(new).__name__ == "DeepseekV2ForCausalLM"
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert set(report["missing_keys"]) <= {"lm_head.weight"}
    with torch.no_grad():
        before, after, elsewhere = model(tokens).logits[0], new(tokens).logits[0], new(tokens.roll(1)).logits[0]
    assert _error(after, before) < 0.03
    assert _error(elsewhere[-1], before[-1]) > 0.1


def test_sample_text_fills_a_measurement() -> None:
    words = " ".join(smollm2_mla.passages()).split()
    assert len(words) > 1000
    assert len(set(words)) > 500


def _prepared(name: str) -> Path:
    if not (MODELS / name / "model.safetensors").is_file():
        pytest.skip(f"{name} is not prepared")
    return MODELS / name


def test_perplexity_needs_two_tokens() -> None:
    with pytest.raises(ConfigError, match="2 or more"):
        perplexity(_prepared("smollm2"), "")


def test_perplexity_of_the_conversion_stays_near() -> None:
    """The claim of the README, on text of the repository that the conversion was not measured on."""
    text = (ROOT / "traces" / "pic_traces" / "data" / "README.md").read_text()
    converted, original = (perplexity(_prepared(name), text, window_len=512) for name in ("smollm2-mla", "smollm2"))
    assert 1.0 < converted / original < 1.5
