"""What the text at a break says of its cause: a role, an image, a thought, an object whose keys changed places."""

from __future__ import annotations

import json
import re

_ROLES = {"system", "developer", "user", "assistant", "model", "tool", "function"}
_IMAGE = re.compile(r"\[(?:input_)?(?:image|video|audio|file)\w* ?\w{0,7}$")
_THOUGHT = re.compile(
    r"\s*(?:<(?:seed:)?think(?:ing)?>|\[THINK\]|◁think▷|<\|channel\|>\s*(?:analysis|thought)|thought\n)"
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def is_role(old: str, new: str) -> bool:
    """Whether a message changed its role."""
    return old.strip() in _ROLES and new.strip() in _ROLES


def is_image(before: str) -> bool:
    """Whether the changed text is the digest of an image."""
    return bool(_IMAGE.search(before))


def is_thought(before: str, old: str, new: str) -> bool:
    """Whether one side has a thought, or its end, where the other goes on without one."""
    if bool(_THOUGHT.match(old)) != bool(_THOUGHT.match(new)):
        return True
    # Both sides may open a thought: one is empty, because the template drops what was thought.
    is_open = bool(_THOUGHT.match(before[-12:].lstrip("\n")) or _THOUGHT.match(old)) and not before.endswith("</think>")
    texts = [re.sub(r"^\s*<think>", "", text).lstrip() for text in (old, new)]
    return is_open and sum(text.startswith("</think>") for text in texts) == 1


def are_keys_reordered(before: str, old: str, new: str) -> bool:
    """Whether both sides go on in the same JSON object, and differ only in the order of its keys.

    Args:
        before: the text in front of the break, which both have.
        old, new: how each goes on, long enough to close the object.
    """
    at = _open_brace(before)
    if at is None:
        return False
    objects = [_object(before[at:] + text) for text in (old, new)]
    return objects[0] is not None and objects[0] == objects[1]


def _open_brace(text: str) -> int | None:
    """Where the innermost object that is still open begins."""
    if text.count('"') % 2 and _STRING.sub("", text).count('"') % 2:
        text += '"'
    masked = _STRING.sub(lambda found: " " * len(found[0]), text)
    depth = 0
    for at in range(len(masked) - 1, -1, -1):
        depth += {"}": 1, "]": 1, "{": -1, "[": -1}.get(masked[at], 0)
        if depth < 0:
            return at if masked[at] == "{" else None
    return None


def _object(text: str) -> object:
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None
