"""The namespaces of the radix tree: the client's key, and our marks that keep some requests apart.

Rows are shared inside a namespace only, and requests of one namespace may have lanes of their own in it. Requests that
opted out have the lane `off`, so that no row which came from a splice reaches them. Requests whose `preset` or `edit`
policy is not the server's have the lane of these: a row that was spliced under one policy never reaches a request under
another. A namespace that an operator switches on again after audits had switched it off begins empty, under the key of
a new generation. Where the chunk index was lost to a fault, all namespaces but those of the lane `off` begin anew.

Our marks begin a key of the tree, because SGLang looks for the id of a LoRA adapter at its end.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

KEY_MARK: Final = "\x1fpic:"
"""Begins every mark of ours; a unit separator ends it. The front end refuses a key of a client that holds this, and
`unmarked` makes another one of a key that came past it."""

MAX_KEY_LEN: Final = 1024
"""Characters of an extra key, and of a salt, beyond which nothing is remembered of a namespace."""

OFF_LANE: Final = "off"
"""The lane of requests that are kept apart from spliced rows."""


RESTART: Final = "restart"
"""Begins the mark of a namespace that began anew because the chunk index was lost."""


FORGED: Final = "forged"
"""The mark of what stands for a client's key that holds marks."""


class Namespace(NamedTuple):
    """Rows are shared only within a namespace."""

    extra_key: str | None = None
    """SGLang's key: what the client sent, then the id of the LoRA adapter. In the tree it begins with our marks."""
    cache_salt: str | None = None
    adapter: str | None = None
    """The id of the LoRA adapter; in the tree a mark of the key stands for it."""

    @property
    def is_too_long(self) -> bool:
        """Whether its name is longer than may be kept for clients, who choose it."""
        return max(len(self.extra_key or ""), len(self.cache_salt or "")) > MAX_KEY_LEN


def tree_key(
    extra_key: str | None,
    *,
    adapter: str | None = None,
    lane: str | None = None,
    generation: int = 0,
    restarts: int = 0,
) -> str | None:
    """The extra key under which a request's rows are in the tree, made of the one that SGLang gave the request.

    Args:
        adapter: the id of the request's LoRA adapter, which ends `extra_key`. An id that comes from a client as its key
            is no adapter's, although SGLang derives the ids of `--lora-paths` from names.
        lane: the request's lane in its namespace: `OFF_LANE`, a preset, an `edit` policy or both, or `None` for the
            namespace itself.
        generation: how often the namespace was switched on again; `OFF_LANE` holds no spliced row, and has one key.
        restarts: how often the chunk index was lost to a fault; likewise.
    """
    marks = [] if lane is None else [lane]
    marks += [str(generation)] if generation and lane != OFF_LANE else []
    marks += [f"{RESTART} {restarts}"] if restarts and lane != OFF_LANE else []
    marks += [] if adapter is None else ["lora"]
    return "".join(map(_mark, marks)) + (extra_key or "") if marks else extra_key


def unmarked(extra_key: str | None, adapter: str | None = None) -> str | None:
    """A client's key, or what stands for one that holds marks of ours, and is no other client's key.

    Args:
        extra_key: the key that SGLang gave the request.
        adapter: the id of the request's LoRA adapter, which ends it.
    """
    if extra_key is None or KEY_MARK not in extra_key:
        return extra_key
    digest = hashlib.blake2b(extra_key.encode("utf8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{_mark(FORGED)}{digest}{adapter or ''}"


def without_lane(key: str | None, lane: str) -> str:
    """The key of the namespace that a lane is in, made of a key of `tree_key`."""
    return (key or "").removeprefix(_mark(lane))


def is_strict(key: str | None) -> bool:
    """Whether a key of the tree belongs to requests that are kept apart from spliced rows."""
    return key is not None and key.startswith(_mark(OFF_LANE))


def is_shared(key: str | None) -> bool:
    """Whether other servers put the same rows under a key of the tree: it has none of our marks."""
    return key is None or not key.startswith(KEY_MARK)


def told_key(key: str | None) -> str | None:
    """The client's key behind a key of the tree, empty for none; None for lanes and LoRA adapters.

    A namespace that began anew is the same one to its clients.
    """
    while key is not None and key.startswith(KEY_MARK):
        mark, _, rest = key.removeprefix(KEY_MARK).partition("\x1f")
        if not mark.isdigit() and not mark.startswith(RESTART):
            return None
        key = rest
    return key or ""


def _mark(name: str) -> str:
    return f"{KEY_MARK}{name}\x1f"
