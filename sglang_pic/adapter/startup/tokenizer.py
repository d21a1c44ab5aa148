"""The served tokenizer, and its tokens that open or close a message, read from the chat template.

Cutting restarts after each of these tokens, so equal messages are cut equally at any position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from sglang_pic.core import MESSAGE_BREAK


class Tokenizer(Protocol):
    """The members of a tokenizer of transformers that are used here."""

    all_special_ids: Sequence[int]
    added_tokens_decoder: Mapping[int, Any]  # `special`
    chat_template: object

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    def batch_decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> list[str]: ...
    def __len__(self) -> int: ...


def read_tokenizer(server_args: Any) -> tuple[Tokenizer | None, str]:
    """The served tokenizer, or None and a sentence that says why and what the server loses."""
    if server_args.skip_tokenizer_init:
        return None, _LOST.format("--skip-tokenizer-init")
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    try:
        tokenizer: Tokenizer = get_tokenizer(
            server_args.tokenizer_path or server_args.model_path,
            tokenizer_mode=server_args.tokenizer_mode,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
        )
    except Exception as error:
        return None, _LOST.format(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return tokenizer, ""


_LOST: Final = (
    "Without a tokenizer ({}) prompts are cut by content alone, and all text after a changed field is computed, as "
    "with `edit` set to `recompile`."
)


def delimiters_of(tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens of `tokenizer` that its chat template writes; all of them without a template."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return frozenset(special)
    written = {token_id for token_id in special if tokenizer.convert_ids_to_tokens(token_id) in template}
    return frozenset(written or special)


def texts_of(tokenizer: Tokenizer, delimiters: frozenset[int]) -> list[str]:
    """The text of every token id, with the spaces that belong to it; delimiters are `MESSAGE_BREAK`."""
    # After another token, because some tokenizers drop a space at the beginning of a text.
    (anchor,) = tokenizer.encode("a", add_special_tokens=False)[:1]
    decoded = tokenizer.batch_decode(
        [[anchor], *([anchor, token] for token in range(len(tokenizer)))],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    texts = [text[len(decoded[0]) :] for text in decoded[1:]]
    for token in delimiters:
        if token < len(texts):
            texts[token] = MESSAGE_BREAK
    return texts
