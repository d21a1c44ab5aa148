"""Bodies of Anthropic's API in logs become what SGLang's own converter makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pic_traces.formats.anthropic import to_messages
from pic_traces.formats.parts import to_tools
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

BLOCKS = json.loads((Path(__file__).parent / "logs" / "anthropic_blocks.json").read_text())
RESULTS = {
    "messages": [
        {"role": "user", "content": "plain"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "before"},
                {"type": "tool_result", "tool_use_id": "t", "content": "text"},
                {"type": "tool_result", "tool_use_id": "u"},
                {"type": "tool_result", "tool_use_id": "v", "content": [{"type": "text", "text": x} for x in "ab"]},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]
}


@pytest.mark.parametrize("body", [BLOCKS, RESULTS])
def test_messages_and_tools_are_sglangs(body: dict[str, Any]) -> None:
    chat = SimpleNamespace(supports_inline_system=False, supports_native_reasoning_history=lambda: True)
    request = AnthropicMessagesRequest(**{"model": "m", "max_tokens": 9, **body})
    theirs = AnthropicServing(chat)._convert_to_chat_completion_request(request)
    ours = to_messages(body)
    for mine in ours:
        # None and "" are the same text to every template.
        if mine["role"] == "assistant" and mine["content"] == "":
            del mine["content"]
    assert [_plain(message.model_dump(exclude_none=True)) for message in theirs.messages] == [*map(_plain, ours)]
    tools = [tool.model_dump(exclude_none=True) for tool in theirs.tools or ()]
    assert tools == (to_tools(body.get("tools")) or [])


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without what SGLang's classes add: the detail of an image, the index of a call."""
    calls = [{"id": call["id"], "function": call["function"]} for call in message.get("tool_calls", ())]
    content = message.get("content")
    if isinstance(content, list):
        content = [part.get("text") or part["image_url"]["url"] for part in content]
    return {**message, "content": content, "tool_calls": calls}
