"""Which texts of a request a reader left unread, by the names of their fields.

Texts are leaves that look like language. One is read if it is in the messages, the tools or the options that a chat
template gets, whole or as a part of a longer text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pic_traces.formats.bodies import ANSWERS, as_list, as_object
from pic_traces.formats.reader import Dict, Request
from pic_traces.session import JsonValue

_SHOWN = ("content", "tool_calls", "reasoning_content", "name", "refusal", "function_call", "thinking")
"""Fields of messages that chat templates show."""
_NO_PROMPT = (
    *ANSWERS, "response_format", "format", "metadata", "headers", "cookies", "signature", "url", "image_url", "source",
    "cache_control", "guided_json", "json_schema", "error", "choices", "stop", "refusal",
)  # fmt: skip
"""Fields that no prompt has; `metadata` and what stands outside the body may be long without being one."""
_PIECE = re.compile(r"[^\\'\"\x00-\x1f\u0080-\uffff]+")
_MIN_CHARS, _MIN_SPACES, _MIN_SHARE, _MIN_SHARE_OUTSIDE = 24, 3, 0.01, 0.5


@dataclass(slots=True)
class Unread:
    """Counts characters of a log's requests: those that were read, and the others by field."""

    num_read: int = 0
    inside: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)

    def add(self, request: Request, line: Dict) -> None:
        """Compare a request with the body that it was made of, and with the line that this was in."""
        shown: list[JsonValue] = [{key: message.get(key) for key in _SHOWN} for message in request.messages]
        texts = {text for _, text in _leaves([shown, request.tools, request.options], "", ())}
        read = "\n".join(texts)
        self.num_read += len(read)
        for counts, whole in ((self.inside, request.body), (self.outside, {} if line is request.body else line)):
            for path, text in _leaves(whole, "", _NO_PROMPT):
                if text not in texts and _is_language(text) and not _is_in(text, read):
                    counts[path] += len(text)

    def summary(self) -> str | None:
        """What was left unread, in a sentence; None if nothing that matters."""
        least = ((self.inside, _MIN_SHARE), (self.outside, _MIN_SHARE_OUTSIDE))
        found = [(num, path) for counts, share in least for path, num in counts.items() if num > share * self.num_read]
        if not found:
            return None
        named = ", ".join(f"`{path}` ({num:,} characters)" for num, path in sorted(found, reverse=True)[:4])
        share = sum(num for num, _ in found) / (self.num_read + sum(num for num, _ in found))
        return (
            f"{share:.0%} of the text in the requests is in fields that are not read: {named}; if prompts had it, the "
            "counts lack it: name the log's form in an issue, or read it with --reader"
        )


def _leaves(value: JsonValue, path: str, left_out: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The texts in a value with their paths; also of JSON in strings."""
    if isinstance(value, str):
        inner = (as_object(value) or as_list(value)) if value.lstrip()[:1] in ("{", "[") else None
        if inner:
            yield from _leaves(inner, path, left_out)
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in left_out:
                yield from _leaves(item, f"{path}.{key}" if path else key, left_out)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, f"{path}[]", left_out)


def _is_language(text: str) -> bool:
    if len(text) < _MIN_CHARS or text.lstrip()[:1] in ("{", "["):
        return False
    return text.count(" ") >= _MIN_SPACES or sum(char > "\u2e80" for char in text[:200]) >= _MIN_CHARS // 2


def _is_in(text: str, read: str) -> bool:
    """Whether a text is part of what was read; by its longest piece that is written the same everywhere."""
    if text in read:
        return True
    pieces = _PIECE.findall(text)
    return max(pieces, key=len) in read if len(max(pieces, key=len, default="")) >= _MIN_CHARS // 2 else False
