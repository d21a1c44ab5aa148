"""The exceptions of the project.

PicError
├── ConfigError       a setting or a request option is not valid
├── ContractError     SGLang differs from what this version was built for
├── UnsupportedError  a model, KV pool, backend or topology that cannot be served safely
├── ServerError       a server that a client called refused, was not there or runs without the plugin
└── BenchError        a benchmark's server, a comparison or a fidelity run failed

Traces have a family of their own: `pic_traces.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class PicError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(PicError, ValueError):
    """A setting or a request option is not valid; the message says what is allowed."""


class ContractError(PicError):
    """SGLang differs from what this version was built for."""


class UnsupportedError(PicError):
    """A model, KV pool, attention backend or flag that cannot be served safely; see `Refused.line`."""


class ServerError(PicError):
    """A server that a client called refused, could not be reached or runs without the plugin."""


class BenchError(PicError):
    """A benchmark's server, a comparison or a fidelity run failed; the message says where to look."""


def did_you_mean(word: object, allowed: Iterable[str]) -> str:
    """The end of a message about a word that is not allowed: the nearest allowed one, or nothing if none is near."""
    from difflib import get_close_matches  # Only after a mistake: every start would import it.

    near = get_close_matches(str(word)[:64], [*allowed], n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


class Refused(NamedTuple):
    """Why something is not served, and what to change."""

    reason: str
    """One clause."""
    change: str = "serve this model without --radix-cache-backend pic"
    """One clause that begins with a verb."""

    def line(self, what: str) -> str:
        """The message that stops a server with `what`."""
        return f"--radix-cache-backend pic does not work with {what}: {self.reason}; {self.change}."
