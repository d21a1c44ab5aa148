"""A recorded session as every loader and generator hands it on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

if TYPE_CHECKING:
    JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
else:
    # msgspec cannot build a decoder for a recursive alias; what it decodes from JSON is a JsonValue anyway.
    JsonValue = Any

T = TypeVar("T")


def as_type(value: JsonValue, kind: type[T]) -> T | None:
    """A value that others sent, if it is of this type; None otherwise. A boolean is no number."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


Message: TypeAlias = dict[str, JsonValue]
"""One OpenAI chat message as it was recorded: `role`, `content`, and whatever else the client sent. It is passed on
unread, so its keys are the API's and not ours."""


Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges `[start, end)`, in an order that means something."""


def spans_of(indices: Iterable[int]) -> Spans:
    """Indices as ranges, in their order. O(n)."""
    spans: list[tuple[int, int]] = []
    for index in indices:
        if spans and spans[-1][1] == index:
            spans[-1] = (spans[-1][0], index + 1)
        else:
            spans.append((index, index + 1))
    return tuple(spans)


class CallSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one LLM call was sent and gave back, as references into its session's pool.

    Args:
        spans: half-open ranges `[start, end)` of the pool, in prompt order.
        completion: index of the recorded answer in the pool; None where none was recorded.
        tools: the tool schemas sent with the call, or None.
        agent: which agent of the session made the call; None is the main one.
        options: further request fields that shape the prompt (`tool_choice`, `chat_template_kwargs`).
        prompt_tokens: length of the prompt as the log recorded it, in tokens of the model that served it; None where
            the log does not say.
    """

    spans: Spans
    completion: int | None = None
    tools: list[JsonValue] | None = None
    agent: str | None = None
    options: dict[str, JsonValue] = {}
    prompt_tokens: int | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One LLM call with its messages laid out; `messages` is a fresh list, the messages in it are shared."""

    session_id: str
    index: int
    messages: list[Message]
    completion: Message | None
    tools: list[JsonValue] | None
    agent: str | None
    options: dict[str, JsonValue]
    prompt_tokens: int | None = None


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded session: a pool of messages and its calls, in the order they were made."""

    session_id: str
    source: str
    pool: list[Message]
    specs: list[CallSpec]
    license: str | None = None

    @property
    def num_calls(self) -> int:
        """How many LLM calls the session made."""
        return len(self.specs)

    def calls(self) -> Iterator[Call]:
        """Yield every call in order; the recorded completions of earlier calls are in later prompts as recorded."""
        for index, spec in enumerate(self.specs):
            yield Call(
                session_id=self.session_id,
                index=index,
                messages=[message for start, end in spec.spans for message in self.pool[start:end]],
                completion=None if spec.completion is None else self.pool[spec.completion],
                tools=spec.tools,
                agent=spec.agent,
                options=spec.options,
                prompt_tokens=spec.prompt_tokens,
            )
