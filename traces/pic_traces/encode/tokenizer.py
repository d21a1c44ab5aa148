"""A model's own tokenizer, read from `tokenizer.json`, that tokenises only text it has not seen.

A text is cut at its added tokens. That is exact: a tokenizer splits these off before anything else, so the text between
two of them is tokenised alike wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pic_traces.encode.tokenized import MAX_CACHED_BYTES, TokenizedCache, TokenizedText
from pic_traces.errors import TraceError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# White space as Unicode defines it, and the tokenizers library with it; Python's \s has more.
_SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


class TextEncoder:
    """Texts as stretches: each is an added token with the text up to the next one, or text before the first.

    Args:
        tokenizer: the model's.
        max_cached_bytes: host memory for texts that were tokenised before.
    """

    def __init__(self, tokenizer: Tokenizer, max_cached_bytes: int = MAX_CACHED_BYTES) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # It would only add tokens of its own, which templates write themselves, and cut spaces off the offsets.
        tokenizer.post_processor = None
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self.added_tokens = _cutting_pattern(list(added.values()))
        self._cache = TokenizedCache(self._encode, max_cached_bytes)

    @cached_property
    def texts(self) -> list[str]:
        """The text of each id, with the spaces that belong to it; a character of several tokens is in none of them."""
        # Decoded behind another token, because some tokenizers strip the space in front of a text.
        head = self._tokenizer.encode("a", add_special_tokens=False).ids
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        skipped = len(self._tokenizer.decode(head, skip_special_tokens=False))
        pairs = self._tokenizer.decode_batch([[*head, token] for token in range(size)], skip_special_tokens=False)
        return [text[skipped:] for text in pairs]

    def tokenize(self, text: str) -> Iterator[TokenizedText]:
        """The stretches of a text, which joined are the text; their ids joined are what the tokenizer makes of it."""
        get = self._cache.get
        start = 0
        for end in self.cuts(text):
            yield get(text[start:end])
            start = end
        if start < len(text):
            yield get(text[start:])

    def cuts(self, text: str) -> Iterator[int]:
        """Where stretches begin inside a text."""
        if self.added_tokens is not None:
            for match in self.added_tokens.finditer(text):
                if (at := match.start()) > 0:
                    yield at

    def tokenize_after(self, last: TokenizedText | None, text: str) -> Iterator[TokenizedText]:
        """The stretches of a text that follows a stretch directly, without touching that stretch's tokens.

        Where the tokenizer, given both at once, would join tokens over the boundary, the text is tokenised apart: a
        model that goes on after `last` writes new tokens and changes none.
        """
        if last is None or not text or self._opening(text):
            yield from self.tokenize(text)
            return
        first = next(self.cuts(text), len(text))
        yield self._continue(last, text[:first])
        yield from self.tokenize(text[first:])

    def _opening(self, text: str) -> str:
        """The added token that a text begins with; empty where it does not."""
        match = self.added_tokens.match(text) if self.added_tokens is not None else None
        return match.group() if match else ""

    def _continue(self, last: TokenizedText, text: str) -> TokenizedText:
        # NOTE: without the added token in front, some tokenizers would take the text for the beginning of everything.
        for context in (last.text, self._opening(last.text)):
            head = self._cache.get(context).ids
            whole = self._encode(context + text)
            if np.array_equal(whole.ids[: len(head)], head):
                break
        starts = np.maximum(whole.starts[len(head) :] - np.int32(len(context)), 0)
        return TokenizedText(text, whole.ids[len(head) :], starts)

    def _encode(self, text: str) -> TokenizedText:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        if len(ids) == 0:
            return TokenizedText(text, ids, ids)
        spans = np.array(encoding.offsets, np.int32)
        starts = np.empty(len(ids), np.int32)
        starts[0] = 0
        # A character of several tokens is in the offsets of them all; it belongs to the first.
        np.maximum(spans[1:, 0], np.maximum.accumulate(spans[:-1, 1]), out=starts[1:])
        return TokenizedText(text, ids, starts)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json` of a folder.

    Raises:
        TraceError: the package `tokenizers` or the file is missing, or the file cannot be read.
    """
    path = folder / "tokenizer.json"
    asked = f"tokenizer={str(folder)!r}"
    if not path.is_file():
        raise TraceError(f"{asked}: {path} does not exist; a folder with a tokenizer.json is expected")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TraceError(f"{asked}: needs the package tokenizers: pip install '.[census]' in the repository") from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TraceError(f"{asked}: {path} cannot be read: {error}") from error


def _cutting_pattern(tokens: list[AddedToken]) -> re.Pattern[str] | None:
    """What the tokenizer looks for in raw text, before normalising: the longest match at the leftmost place.

    A token that must stand alone as a word is left to the tokenizer: whether it does depends on its neighbours.
    """
    found = [token for token in tokens if not token.normalized and not token.single_word and token.content]
    if not found:
        return None
    found.sort(key=lambda token: len(token.content), reverse=True)
    return re.compile("|".join(_pattern(token) for token in found))


def _pattern(token: AddedToken) -> str:
    # NOTE: spaces count from the first of a row on; from each of them the row would be read again, in quadratic time.
    before = f"(?:(?<!{_SPACE}){_SPACE}+)?" if token.lstrip else ""
    after = f"{_SPACE}*" if token.rstrip else ""
    return f"{before}{re.escape(token.content)}{after}"
