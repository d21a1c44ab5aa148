"""Changes one field of a prompt so that most of the prompt stays a prefix hit.

Rows that were computed after a field depend on its value. So the new value goes to the end of the prompt, as an erratum
or as the field itself: no earlier token changes, and no row after it was computed with the old value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from sglang_pic.client.messages import Message
from sglang_pic.errors import ConfigError

_WAYS = ("erratum", "field+erratum", "hoist")


def edit(messages: Sequence[Message], field: str, value: str, how: str = "erratum") -> list[Message]:
    """Return new messages in which a field has another value; `messages` is not changed.

    A field is found by its label: `shelf` matches every line `shelf: VALUE` or `shelf = VALUE`, with or without a
    bullet, and every JSON member `"shelf": VALUE` whose value is a string, a number, `true`, `false` or `null`.
    All matches are the same field; if earlier turns must keep their values, use `"erratum"`.

    The erratum is the line `Correction: "shelf" is now "B7".` at the end of the last message if that is the user's,
    else in a new user message. It replaces an earlier erratum of the field. Repeating an edit changes nothing.

    Args:
        messages: OpenAI messages; a content is a string or a list of parts.
        field: the label.
        value: one line.
        how: `"erratum"` appends an erratum. `"field+erratum"` changes the field in place, too. `"hoist"` removes the
            field's lines and its erratum, and appends the line `FIELD: VALUE`; not for JSON.

    Raises:
        ConfigError: the field is not in the messages, or an argument is not valid.
    """
    if how not in _WAYS:
        raise ConfigError(f"how={how!r}: must be one of {', '.join(map(repr, _WAYS))}; 'erratum' is the default.")
    for name, given in (("field", field), ("value", value)):
        if given != given.strip() or len(given.splitlines()) != 1:
            raise ConfigError(f"{name}={given!r}: must be one line without spaces at its ends; edit others by hand.")
    places = _Field(field)
    if not any(places.is_in(text) for message in messages for text in _texts(message)):
        raise ConfigError(
            f"field={field!r}: the messages must have a line `{field}: VALUE` or a member `{json.dumps(field)}` of "
            "JSON; name the field as it stands there."
        )
    without = _mapped(messages, places.without_erratum)
    if how == "hoist":
        if any(places.is_member_in(text) for message in messages for text in _texts(message)):
            raise ConfigError(
                f"field={field!r}, how='hoist': works for lines only, not in JSON; use 'erratum' or 'field+erratum'."
            )
        return _with_line(_mapped(without, places.without_lines), f"{field}: {value}")
    if how == "field+erratum":
        without = _mapped(without, lambda text: places.with_value(text, value))
    return _with_line(without, places.erratum(value))


class _Field:
    """Finds one field in a text, line by line; errata of any field do not match."""

    def __init__(self, label: str) -> None:
        self._quoted = json.dumps(label, ensure_ascii=False)
        self._line = re.compile(rf"([ \t]*(?:[-*][ \t]+)?{re.escape(label)}[ \t]*[:=][ \t]*)(.*)", re.DOTALL)
        # JSON has what is not ASCII as itself, or escaped as by Python.
        names = "|".join(re.escape(name) for name in (self._quoted, json.dumps(label)))
        self._member = re.compile(
            rf'((?:{names})[ \t]*:[ \t]*)("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true\b|false\b|null\b)'
        )

    def erratum(self, value: str) -> str:
        """The line with the new value."""
        # Quoted as in JSON, so that a name or value cannot be mistaken for another.
        return f"Correction: {self._quoted} is now {json.dumps(value, ensure_ascii=False)}."

    def without_erratum(self, text: str) -> str:
        beginning = f"Correction: {self._quoted} is now "
        return _where(text, lambda line: not (line.startswith(beginning) and _is_erratum(line)))

    def without_lines(self, text: str) -> str:
        return _where(text, lambda line: not self._is_line(line))

    def with_value(self, text: str, value: str) -> str:
        return "\n".join(self._changed(line, value) for line in text.split("\n"))

    def is_in(self, text: str) -> bool:
        return any(self._is_line(line) for line in text.split("\n")) or self.is_member_in(text)

    def is_member_in(self, text: str) -> bool:
        return any(self._member.search(line) and not _is_erratum(line) for line in text.split("\n"))

    def _is_line(self, line: str) -> bool:
        return self._line.fullmatch(line) is not None and not _is_erratum(line)

    def _changed(self, line: str, value: str) -> str:
        if _is_erratum(line):
            return line
        if found := self._line.fullmatch(line):
            return found[1] + value
        return self._member.sub(lambda found: found[1] + _like(found[2], value), line)


def _like(old: str, value: str) -> str:
    """The new value as JSON: a string if the old value was one."""
    is_bare = not old.startswith('"') and re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|null", value)
    return value if is_bare else json.dumps(value, ensure_ascii=False)


def _is_erratum(line: str) -> bool:
    return re.fullmatch(r'Correction: "(?:[^"\\]|\\.)*" is now "(?:[^"\\]|\\.)*"\.', line) is not None


def _where(text: str, keep: Callable[[str], bool]) -> str:
    return "\n".join(line for line in text.split("\n") if keep(line))


def _texts(message: Message) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if isinstance(part.get("text"), str)]


def _mapped(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message]:
    """The messages with changed texts, without messages and parts whose text became empty."""
    kept = []
    for message in messages:
        content = message.get("content")
        texts = _texts(message)
        changed = [change(text) for text in texts]
        if changed == texts:
            kept.append(message)
        elif isinstance(content, str):
            if changed[0]:
                kept.append({**message, "content": changed[0]})
        else:
            pairs = [
                (part, {**part, "text": change(part["text"])} if isinstance(part.get("text"), str) else part)
                for part in content or ()
            ]
            if parts := [after for before, after in pairs if after.get("text") != "" or before == after]:
                kept.append({**message, "content": parts})
    return kept


def _with_line(messages: Sequence[Message], line: str) -> list[Message]:
    """The messages with one more line at the end."""
    *before, last = messages or [{}]
    content = last.get("content")
    if last.get("role") == "user" and content:
        if isinstance(content, str):
            return [*before, {**last, "content": f"{content}\n{line}"}]
        return [*before, {**last, "content": [*content, {"type": "text", "text": line}]}]
    return [*messages, {"role": "user", "content": line}]
