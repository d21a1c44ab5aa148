"""Text as token ids and back by the model's own tokenizer and template.

A block is tokenised alone, so that it has the same ids wherever it stands.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

import msgspec
from pic_traces.encode.chat_template import ChatTemplate, TemplateRefusal, load_chat_template
from tokenizers import Tokenizer

from sglang_pic.errors import BenchError, ConfigError


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


class _Config(msgspec.Struct, frozen=True):
    """Of a model's config.json and generation_config.json."""

    max_position_embeddings: int | None = None
    eos_token_id: int | list[int] | None = None


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
        configs = [_read_config(folder / name) for name in ("config.json", "generation_config.json")]
        self.context_len = configs[0].max_position_embeddings or 4096
        ends = [config.eos_token_id for config in configs]
        self._ends = {token for end in ends if end is not None for token in (end if isinstance(end, list) else [end])}

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

    def ends(self, token: int) -> bool:
        """Whether a token ends the model's turn."""
        return token in self._ends

    def answer(self, ids: Sequence[int]) -> str:
        """The text up to the token that ends the model's turn."""
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids))
        return str(self._tokenizer.decode(list(ids[:end]), skip_special_tokens=True))

    def around(self, system: str, user_before: str, user_after: str) -> tuple[list[int], list[int]]:
        """The ids before and behind a hole in a conversation of a system and a user message.

        Raises:
            BenchError: the template refuses the conversation, or changes the text around the hole.
        """
        hole = "\ue000"  # private use: no data has it, and no template changes it
        before, found, after = self._render(system, [f"{user_before}{hole}{user_after}"]).partition(hole)
        if not found:
            raise BenchError(f"the chat template of {self._folder} does not show the user's message.")
        return self.ids(before), self.ids(after)

    def conversation(self, system: str, turns: Sequence[str]) -> list[int]:
        """The ids of a conversation up to where the model answers; users and the model take turns.

        Raises:
            BenchError: the template refuses the conversation.
        """
        return self.ids(self._render(system, turns))

    def _render(self, system: str, turns: Sequence[str]) -> str:
        if self._template is None:
            self._template = load_chat_template(self._folder)
        messages = [{"role": "system", "content": system}]
        messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        try:
            return self._template.render(messages, None, {}, add_generation_prompt=True)  # type: ignore[arg-type]
        except TemplateRefusal as error:
            raise BenchError(
                f"the chat template of {self._folder} refuses a conversation with a system message: {error}"
            ) from error


def _read_config(path: Path) -> _Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError):
        return _Config()
