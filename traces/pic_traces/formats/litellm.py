"""LiteLLM: rows of its spend logs, and its StandardLoggingPayload."""

from __future__ import annotations

from collections.abc import Iterator

from pic_traces.errors import TraceError
from pic_traces.formats.bodies import as_object, as_objects, find_answer, find_body
from pic_traces.formats.chat import request_of
from pic_traces.formats.reader import Dict, Reader, Request
from pic_traces.formats.responses import Responses
from pic_traces.lines import Line

# What LiteLLM writes in place of texts.
_REDACTED = "redacted-by-litellm"
_CUT = "litellm_truncated"


class LiteLLM(Reader):
    """Implements `Reader`."""

    name = "LiteLLM log rows (`call_type`)"

    def __init__(self) -> None:
        self._responses = Responses()

    @staticmethod
    def recognizes(line: Line) -> bool:
        return "call_type" in line.value and bool({"messages", "proxy_server_request"} & line.value.keys())

    def take(self, line: Line) -> Iterator[Request]:
        """One row; the client's own body is taken where it was stored, because it has the tools."""
        row = {**line.value, "messages": line.value.get("messages") or None}
        found = find_body(as_object(row.get("proxy_server_request")), _has_messages)
        body = found.body if found else row
        texts = f"{body.get('messages')}"
        if _CUT in texts:
            raise TraceError(
                f"{line.path}{line.place}: LiteLLM cut its texts; set MAX_STRING_LENGTH_PROMPT_IN_DB=10000000 in the "
                "proxy's environment, and record again"
            )
        if not body.get("messages") or _REDACTED in texts:
            if Responses.recognizes(line):
                yield from self._responses.take(line)
                return
            raise line.error(
                "a LiteLLM row without its prompt; set `store_prompts_in_spend_logs: true` in general_settings and "
                "`turn_off_message_logging: false` in litellm_settings, and record again"
            )
        if as_objects(body.get("messages")) and "type" in as_objects(body["messages"])[0]:
            body = {**body, "input": body["messages"]}
            yield from self._responses.take(line._replace(value={**row, **body, "messages": None}))
            return
        yield request_of(line, body, find_answer(row))


def _has_messages(value: Dict) -> Dict | None:
    return value if value.get("messages") else None
