"""What a report says of the served model, as far as the model's folder tells."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's folder or hub name, with what its config.json says where it is a folder."""

    path: str
    name: str
    architecture: str | None = None
    dtype: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    context_len: int | None = None
    weights_bytes: int | None = None


class _HfConfig(msgspec.Struct, frozen=True):
    """The parts of a model's config.json that the report shows."""

    architectures: list[str] = []
    dtype: str | None = None
    torch_dtype: str | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    max_position_embeddings: int | None = None


def model_facts(path: str) -> Model:
    """What the model's folder says about it; only the name for a hub model or a folder without config.json."""
    folder = Path(path)
    name = folder.resolve().name if folder.exists() else path
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_HfConfig)
    except (OSError, msgspec.DecodeError):
        return Model(path=path, name=name)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Model(
        path=path,
        name=name,
        architecture=config.architectures[0] if config.architectures else None,
        dtype=config.dtype or config.torch_dtype,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        context_len=config.max_position_embeddings,
        weights_bytes=weights or None,
    )
