"""Removes known nonces of agents from requests, as a callback of LiteLLM's proxy.

Put this file beside `config.yaml`, with `litellm_settings: {callbacks: pic_nonces.callback}` there.
"""

from __future__ import annotations

import re
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

# What stays, what is removed right after it, and the characters within which it begins.
NONCES: list[Any] = []


def strip(text: str) -> str:
    for kept, removed, within in NONCES:
        found = re.search(f"({kept}){removed}", text)
        if found and found.start() <= within:
            text = text[: found.end(1)] + text[found.end() :]
    return text


def strip_content(content: Any) -> Any:
    if isinstance(content, str):
        return strip(content)
    parts = [
        {**part, "text": strip(part["text"])} if isinstance(part, dict) and part.get("text") else part
        for part in content or []
    ]
    return [part for part in parts if not isinstance(part, dict) or part.get("text") != ""]


class Nonces(CustomLogger):
    async def async_pre_call_hook(self, user_api_key_dict: Any, cache: Any, data: dict, call_type: str) -> dict:
        for key in ("system", "instructions"):
            if data.get(key):
                data[key] = strip_content(data[key])
        for key in ("messages", "input"):
            first = data[key][0] if isinstance(data.get(key), list) and data[key] else {}
            if isinstance(first, dict) and first.get("role") in ("system", "developer"):
                first["content"] = strip_content(first.get("content"))
                if not first["content"] and len(data[key]) > 1:
                    data[key] = data[key][1:]
        return data


callback = Nonces()
