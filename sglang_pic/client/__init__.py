"""A client library: compiles skills on a server, composes messages with them, and edits fields of prompts.

Needs neither torch nor SGLang. `Skills` and `AsyncSkills` need httpx (the extra `client`).

    skills = Skills("http://127.0.0.1:30000")
    skills.compile("refunds", REFUNDS, behind=SYSTEM)
    client.chat.completions.create(model=..., messages=compose(SYSTEM, [REFUNDS], question), extra_body=NEAR)
"""

from __future__ import annotations

from sglang_pic.client.edits import edit
from sglang_pic.client.messages import NEAR, Message, compose
from sglang_pic.client.skills import AsyncSkills, Pin, Receipt, Skills

__all__ = ["NEAR", "AsyncSkills", "Message", "Pin", "Receipt", "Skills", "compose", "edit"]
