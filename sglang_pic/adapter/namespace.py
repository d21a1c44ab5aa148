"""The namespaces of the radix tree: what the client names, and the marks of ours that keep some requests apart.

Rows are shared inside a namespace only, and requests of one namespace may have lanes of their own in it. Requests that
opted out have the lane `off`, so that no row which came from a splice reaches them. Requests whose `edit` policy is not
the server's have the lane of that policy: a row that was spliced under one policy never reaches a request under
another. A namespace that an operator switches on again after audits had switched it off begins empty, under the key of
a new generation. Where the chunk index was lost to a fault, all namespaces but those of the lane `off` begin anew.
"""

from __future__ import annotations

from typing import Final, NamedTuple

KEY_MARK = "\x1fpic:"
"""Begins every mark of ours. The unit separator keeps marks apart from what clients write; the front end refuses a key
that holds this."""

OFF_LANE: Final = "off"
"""The lane of requests that are kept apart from spliced rows."""


class Namespace(NamedTuple):
    """What rows are shared within."""

    extra_key: str | None = None
    """SGLang's extra key, with the adapter in it."""
    cache_salt: str | None = None


def tree_key(extra_key: str | None, *, lane: str | None = None, generation: int = 0, restarts: int = 0) -> str | None:
    """The extra key under which a request's rows are in the tree, made of the one that the request came with.

    Args:
        lane: the request's lane in its namespace: `OFF_LANE`, an `edit` policy, or `None` for the namespace itself.
        generation: how often the namespace was switched on again; `OFF_LANE` holds no spliced row, and has one key.
        restarts: how often the chunk index was lost to a fault; likewise.
    """
    marks = [str(generation)] if generation and lane != OFF_LANE else []
    marks += [f"restart {restarts}"] if restarts and lane != OFF_LANE else []
    marks += [] if lane is None else [lane]
    return (extra_key or "") + "".join(KEY_MARK + mark for mark in marks) if marks else extra_key


def adapter_key(extra_key: str | None, lora_id: str | None) -> str | None:
    """The extra key of a request, which SGLang has put the id of its LoRA adapter into.

    An id that comes from a client as its key is no adapter's: SGLang derives the ids of `--lora-paths` from names.
    """
    return extra_key if lora_id is None else f"{KEY_MARK}lora {extra_key}"


def without_lane(key: str | None, lane: str) -> str:
    """The key of the namespace that a lane is in, made of a key of `tree_key`."""
    return (key or "").replace(KEY_MARK + lane, "")


def is_strict(key: str | None) -> bool:
    """Whether a key of the tree belongs to requests that are kept apart from spliced rows."""
    return key is not None and key.endswith(KEY_MARK + OFF_LANE)
