"""Which tokens open or close a message, read from the tokenizer: nothing is wired to one model.

A prompt is cut anew after each of them, so that a whole message or document is cut alike wherever it stands.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["delimiters_of", "read_tokenizer"]

logger = logging.getLogger(__name__)


def read_tokenizer(server_args: Any) -> Any | None:
    """The served tokenizer, or `None` where there is none: prompts are then cut by content alone."""
    if server_args.skip_tokenizer_init:
        return None
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    try:
        return get_tokenizer(
            server_args.tokenizer_path or server_args.model_path,
            tokenizer_mode=server_args.tokenizer_mode,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
        )
    except Exception:
        logger.warning("sglang_pic: no tokenizer could be read; prompts are cut by content alone", exc_info=True)
        return None


def delimiters_of(tokenizer: Any) -> frozenset[int]:
    """The special tokens of `tokenizer` that its chat template writes; all of them where it has no template."""
    special = set(tokenizer.all_special_ids) | {
        token_id for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special
    }
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return frozenset(special)
    written = {token_id for token_id in special if tokenizer.convert_ids_to_tokens(token_id) in template}
    return frozenset(written or special)
