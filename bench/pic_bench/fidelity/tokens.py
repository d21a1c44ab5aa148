"""Text as token ids and back, by the model's own tokenizer; conversations by its own chat template.

Owns the cutting of prompts around placeholders, so that a block is tokenised alone and has the same ids everywhere. It
must not know experiments or servers.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

import msgspec
from pic_traces.encode.chat_template import ChatTemplate, TemplateRefusal, load_chat_template
from tokenizers import Tokenizer

from sglang_pic.errors import BenchError, ConfigError

__all__ = ["Document", "ModelText"]


class Document:
    """A text's token ids and where in them words begin."""

    def __init__(self, text: str, ids: list[int], offsets: Sequence[tuple[int, int]]) -> None:
        self.ids = ids
        self._starts = [at for at, _ in offsets]
        self.word_starts = [
            i for i, (at, _) in enumerate(offsets) if at < len(text) and (text[at].isspace() or text[at - 1].isspace())
        ]

    def window(self, character: int, length: int) -> list[int]:
        """`length` ids around a character of the text, from where a word begins; fewer at the text's end."""
        middle = bisect.bisect_right(self._starts, character) - 1
        wanted = max(0, min(middle - length // 2, len(self.ids) - length))
        start = max((at for at in self.word_starts if at <= wanted), default=0)
        return self.ids[start : start + length]


class ModelText:
    """The tokenizer and template of a model's folder.

    Raises:
        ConfigError: the folder has no `tokenizer.json`.
        TraceError: its chat template cannot be read, where a conversation is asked for.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"--model {str(folder)!r}: {path} does not exist; give a model's folder with a tokenizer."
            )
        self._folder = folder
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template: ChatTemplate | None = None
        self.context_len, self._ends = _model_facts(folder)

    def ids(self, text: str) -> list[int]:
        """A text's ids, with nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def document(self, text: str) -> Document:
        """A text's ids with its words."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Document(text, list(encoding.ids), encoding.offsets)

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens too."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def answer(self, ids: Sequence[int]) -> str:
        """The text up to the token that ends the model's turn."""
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids))
        return str(self._tokenizer.decode(list(ids[:end]), skip_special_tokens=True))

    def around(self, system: str, user_before: str, user_after: str) -> tuple[list[int], list[int]]:
        """The ids before and behind a hole in a conversation of a system and a user message.

        Raises:
            BenchError: the template refuses the conversation, or changes the text around the hole.
        """
        if self._template is None:
            self._template = load_chat_template(self._folder)
        hole = "\ue000"  # private use: no data has it, and no template changes it
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{user_before}{hole}{user_after}"},
        ]
        try:
            text = self._template.render(messages, None, {}, add_generation_prompt=True)  # type: ignore[arg-type]
        except TemplateRefusal as error:
            raise BenchError(
                f"the chat template of {self._folder} refuses a system and a user message: {error}"
            ) from error
        before, found, after = text.partition(hole)
        if not found:
            raise BenchError(f"the chat template of {self._folder} does not show the user's message.")
        return self.ids(before), self.ids(after)


class _Config(msgspec.Struct, frozen=True):
    max_position_embeddings: int | None = None
    eos_token_id: int | list[int] | None = None


def _model_facts(folder: Path) -> tuple[int, frozenset[int]]:
    """The context length, and the ids that end a turn."""
    found = _Config()
    try:
        found = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
        generation = msgspec.json.decode((folder / "generation_config.json").read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError):
        generation = _Config()
    ends: set[int] = set()
    for value in (found.eos_token_id, generation.eos_token_id):
        ends |= set(value) if isinstance(value, list) else set() if value is None else {value}
    return found.max_position_embeddings or 4096, frozenset(ends)
