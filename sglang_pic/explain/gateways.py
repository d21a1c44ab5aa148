"""Known nonces in recorded requests: the requests without them, and rules for gateways that remove them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from importlib.resources import files
from typing import Final

import msgspec
from pic_traces.session import JsonValue, Message, Session

from sglang_pic.nonces import NONCES, strip

GATEWAYS: Final = {"litellm": "litellm_nonces.py", "nginx": "nginx_nonces.js"}
"""By the name of a gateway, the rule without its nonces."""


def without_nonces(session: Session, num_calls: Counter[str]) -> Session:
    """The session without the known nonces in its system prompts; `num_calls` counts the calls that had each."""
    pool = list(session.pool)
    for spec in session.specs:
        at = spec.spans[0][0] if spec.spans else len(pool)
        if at < len(pool) and session.pool[at].get("role") in ("system", "developer"):
            pool[at], found = _strip(session.pool[at])
            num_calls.update(found)
    return msgspec.structs.replace(session, pool=pool)


def _strip(message: Message) -> tuple[Message, list[str]]:
    content = message.get("content")
    if isinstance(content, str):
        text, found = strip(content, NONCES)
        return {**message, "content": text}, found
    parts: list[JsonValue] = []
    all_found: list[str] = []
    for part in content if isinstance(content, list) else ():
        text, found = strip(str(part["text"]), NONCES) if isinstance(part, dict) and "text" in part else ("", [])
        all_found += found
        if text or not found:
            parts.append({**part, "text": text} if isinstance(part, dict) and found else part)
    return ({**message, "content": parts} if all_found else message), all_found


def rule(gateway: str, names: Iterable[str]) -> str:
    """The text of a file for one of `GATEWAYS` that removes the nonces of these names."""
    rows = [[NONCES[name].kept, NONCES[name].removed, NONCES[name].within] for name in names]
    text = (files("sglang_pic.explain") / "assets" / GATEWAYS[gateway]).read_text(encoding="utf-8")
    # A list of strings and numbers in JSON is one in Python and JavaScript, too.
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    return text.replace("= []", f"= [\n{lines},\n]", 1)
