"""Seeded writers with which workloads write, and drafts that become sessions.

Every session has a stream of text of its own, so that more sessions leave the earlier ones as they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pic_traces.session import CallSpec, JsonValue, Message, Session, spans_of

from pic_generate.tool_schemas import make_tool, tool_call, tool_result
from pic_generate.vocabulary import WORDS, CountTokens, load_token_counter, make_text


class Writer:
    """A seeded stream of text: each text depends on the seed and the earlier texts only."""

    def __init__(self, seed: str, count_tokens: CountTokens | None) -> None:
        self.rng = random.Random(seed)
        self.count_tokens = count_tokens

    def prose(self, num_tokens: int) -> str:
        """Sentences of `num_tokens` tokens."""
        return make_text(self.rng, num_tokens, self.count_tokens)

    def document(self, num_tokens: int) -> str:
        """A title line and prose, `num_tokens` tokens together."""
        title = " ".join(word.capitalize() for word in self.rng.sample(WORDS, 3))
        return f"{title}\n{self.prose(num_tokens - 4)}"

    def tool(self, num_tokens: int) -> JsonValue:
        """A tool's schema, about `num_tokens` tokens as compact JSON."""
        return make_tool(self.rng, num_tokens, self.count_tokens)

    def message(self, role: str, num_tokens: int) -> Message:
        """A message of prose."""
        return {"role": role, "content": self.prose(num_tokens)}

    def tool_exchange(
        self, name: str, arguments: Mapping[str, JsonValue], result: str, thought: int
    ) -> tuple[Message, Message]:
        """An assistant's message of `thought` tokens with one tool call, and the tool's result."""
        call_id = f"call_{self.rng.randbytes(12).hex()}"
        return tool_call(call_id, name, arguments, self.prose(thought)), tool_result(call_id, result)


class Draft(Writer):
    """A session while it is written, and its own stream of text."""

    def __init__(self, name: str, seed: int, number: int, count_tokens: CountTokens | None) -> None:
        super().__init__(f"{name} {seed} {number}", count_tokens)
        self._name = name
        self._session_id = f"{name}-{seed}-{number:04d}"
        self._pool: list[Message] = []
        self._specs: list[CallSpec] = []

    def add(self, message: Message) -> int:
        """Put a message into the pool and return its index, which prompts refer to."""
        self._pool.append(message)
        return len(self._pool) - 1

    def call(
        self,
        prompt: Sequence[int],
        completion: Message,
        *,
        tools: Iterable[JsonValue] | None = None,
        agent: str | None = None,
    ) -> int:
        """Record an LLM call whose prompt is these messages of the pool; the answer's index in the pool."""
        answer = self.add(completion)
        listed = None if tools is None else list(tools)
        self._specs.append(CallSpec(spans=spans_of(prompt), completion=answer, tools=listed, agent=agent))
        return answer

    def session(self) -> Session:
        """The session as written so far."""
        return Session(session_id=self._session_id, source=f"gen:{self._name}", pool=self._pool, specs=self._specs)


class WriterFactory:
    """Hands out the writers and drafts of one spec."""

    def __init__(self, name: str, *, seed: int, sessions: int, tokenizer: str | None) -> None:
        """Raises a TraceError where `tokenizer` names a folder without a readable tokenizer."""
        self._name, self._seed, self._sessions = name, seed, sessions
        self._count_tokens = load_token_counter(tokenizer) if tokenizer else None

    def writer(self, purpose: str) -> Writer:
        """A stream of text for the parts that all sessions share."""
        return Writer(f"{purpose} {self._seed}", self._count_tokens)

    def drafts(self) -> Iterator[Draft]:
        """Yield an empty draft for each session."""
        for number in range(self._sessions):
            yield Draft(self._name, self._seed, number, self._count_tokens)
