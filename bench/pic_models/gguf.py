"""Writes an ordinary bf16 checkpoint from a GGUF file: weights, configuration, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pic_platform import torchvision_shim

from pic_models.checkpoint import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(source: Path, progress: Progress) -> PreTrainedModel:
    """The model in bf16, with nothing in its configuration of how the file stores it."""
    torchvision_shim.install()
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    progress(f"unpacking {source.name}")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    # The checkpoint is not quantised, so a reader must not find how the file stores it.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def write_model(model: PreTrainedModel, target: Path, progress: Progress, *, bos_id: int, eos_id: int) -> None:
    """Write the checkpoint, which ends a generation at `eos_id`, into the empty folder `target`."""
    from transformers import GenerationConfig

    progress("writing the bf16 checkpoint")
    model.generation_config = GenerationConfig(bos_token_id=bos_id, eos_token_id=eos_id, pad_token_id=eos_id)
    model.save_pretrained(target)


def write_tokenizer(
    source: Path,
    target: Path,
    progress: Progress,
    *,
    context_len: int,
    chat_template: str | None = None,
    **settings: bool,
) -> None:
    """Write the file's tokenizer into the folder `target`.

    Args:
        chat_template: in the place of the file's.
        settings: further ones of the tokenizer's class.
    """
    torchvision_shim.install()
    from transformers import AutoTokenizer

    progress("writing the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, **settings)
    tokenizer.model_max_length = context_len
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    tokenizer.save_pretrained(target)
