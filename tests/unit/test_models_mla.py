"""The conversion to MLA: its shared key is the best one, and a reader of the checkpoint computes what the model did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_pic.models import checkpoint, mla_layer, smollm2_mla
from sglang_pic.models.mla_layer import GroupedAttention, MlaShape
from sglang_pic.models.perplexity import perplexity
from sglang_pic.platform import torchvision_shim
from tests.conftest import MODELS, ROOT

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 96, 6, 3, 8
NUM_IDLE = 16
"""Directions of the input that carry nothing."""


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


def _moments(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.T @ inputs / len(inputs)


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


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


def _prepared(name: str) -> Path:
    if not (MODELS / name / "model.safetensors").is_file():
        pytest.skip(f"{name} is not prepared")
    return MODELS / name


def test_perplexity_of_the_conversion_stays_near() -> None:
    """The claim of the README, on text of the repository that the conversion was not measured on."""
    text = (ROOT / "traces" / "pic_traces" / "data" / "README.md").read_text()
    converted, original = (perplexity(_prepared(name), text, window_len=512) for name in ("smollm2-mla", "smollm2"))
    assert 1.0 < converted / original < 1.5
