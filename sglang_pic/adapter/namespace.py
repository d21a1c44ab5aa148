"""The namespaces of the radix tree: what the client names, and the marks of ours that keep some requests apart.

Rows are shared inside a namespace only. Requests that opted out share rows with each other and with nobody else, so
that no row which came from a splice reaches them. A namespace that an operator switches on again after audits had
switched it off begins empty, under the key of a new generation.
"""

from __future__ import annotations

from typing import NamedTuple

KEY_MARK = "\x1fpic:"
"""Begins every mark of ours. The unit separator keeps marks apart from what clients write; the front end refuses a key
that holds this."""

_STRICT_MARK = KEY_MARK + "off"


class Namespace(NamedTuple):
    """What rows are shared within."""

    extra_key: str | None = None
    """SGLang's extra key, with the adapter in it."""
    cache_salt: str | None = None


def tree_key(extra_key: str | None, *, strict: bool, generation: int) -> str | None:
    """The extra key under which a request's rows are in the tree, made of the one that the request came with.

    Args:
        strict: keep the request apart from spliced rows.
        generation: how often the namespace was switched on again.
    """
    if strict:
        return (extra_key or "") + _STRICT_MARK
    return extra_key if generation == 0 else f"{extra_key or ''}{KEY_MARK}{generation}"


def is_strict(key: str | None) -> bool:
    """Whether a key of the tree belongs to requests that are kept apart from spliced rows."""
    return key is not None and key.endswith(_STRICT_MARK)
