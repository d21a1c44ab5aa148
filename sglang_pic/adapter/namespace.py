"""The namespaces of the radix tree: the client's key, and our marks, which separate lanes.

Rows are shared only within a namespace and its lane. Requests that opted out have the lane `off`, so they never get
spliced rows. Requests with another `preset` or `edit` than the server's have a lane of these, so they get no rows
spliced under another policy. A namespace that is switched on again after an audit starts empty, with the mark of a new
generation. After a fault that emptied the chunk index, all keys but those of the lane `off` get a new mark.

Marks are at the start of a key, because SGLang looks for the id of a LoRA adapter at its end.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

KEY_MARK: Final = "\x1fpic:"
"""Start of every mark, which ends with a unit separator. The front end refuses client keys that contain it; `unmarked`
replaces those that reach the scheduler another way."""

MAX_KEY_LEN: Final = 1024
"""Most characters of an extra key, and of a salt; requests with longer ones reuse and donate nothing."""

OFF_LANE: Final = "off"
"""The lane of requests that opted out: it has no spliced rows."""

FORGED: Final = "forged"
"""The mark of the key that replaces a client's key with marks."""


class Namespace(NamedTuple):
    """Rows are shared only within a namespace."""

    extra_key: str | None = None
    """SGLang's key: the client's, then the id of the LoRA adapter. In the tree it begins with our marks."""
    cache_salt: str | None = None
    adapter: str | None = None
    """The id of the LoRA adapter; None in the tree, where the key has a mark instead."""

    @property
    def tenant(self) -> str:
        """Names the client in metrics: 8 hex digits of the SHA-256 of the salt, else of the client's key; or `none`."""
        name = self.cache_salt or (self.extra_key or "").removesuffix(self.adapter or "")
        return hashlib.sha256(name.encode("utf8", "surrogatepass")).hexdigest()[:8] if name else "none"


def tree_key(
    extra_key: str | None,
    *,
    adapter: str | None = None,
    lane: str | None = None,
    generation: int = 0,
    restarts: int = 0,
) -> str | None:
    """The extra key of a request's rows in the tree.

    Args:
        extra_key: the key that SGLang gave the request.
        adapter: the id of the request's LoRA adapter, at the end of `extra_key`; it adds a mark, so that a client
            cannot send an adapter's id as its key.
        lane: `OFF_LANE`, a preset, an `edit` policy or both; `None` for no lane.
        generation: how often the namespace was switched on again; ignored for `OFF_LANE`.
        restarts: how often a fault emptied the chunk index; ignored for `OFF_LANE`.
    """
    marks = [] if lane is None else [lane]
    marks += [str(generation)] if generation and lane != OFF_LANE else []
    marks += [f"restart {restarts}"] if restarts and lane != OFF_LANE else []
    marks += [] if adapter is None else ["lora"]
    return "".join(map(_mark, marks)) + (extra_key or "") if marks else extra_key


def unmarked(extra_key: str | None, adapter: str | None = None) -> str | None:
    """The client's key; if it contains marks, a unique key that no client can send.

    Args:
        extra_key: the key that SGLang gave the request.
        adapter: the id of the request's LoRA adapter, at its end.
    """
    if extra_key is None or KEY_MARK not in extra_key:
        return extra_key
    digest = hashlib.blake2b(extra_key.encode("utf8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{_mark(FORGED)}{digest}{adapter or ''}"


def is_strict(key: str | None) -> bool:
    """Whether a key of the tree has the lane `OFF_LANE`."""
    return key is not None and key.startswith(_mark(OFF_LANE))


def _mark(name: str) -> str:
    return f"{KEY_MARK}{name}\x1f"
