"""Certificates: files that say how much answers of one model lose under one set of settings, and how it was measured.

`sglang-pic tune` writes them. A server that is given one says at start whether it is what was measured; it serves as
it is configured in either case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from sglang_pic import __version__
from sglang_pic.core import ReusePolicy
from sglang_pic.errors import ConfigError

Settings = dict[str, int | str]
"""A whole reuse policy. Not the struct, so that a certificate of a version with other settings can be compared."""


class Served(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answers of a server depend on."""

    model: str
    """The name of its folder."""
    weights: str | None
    """Digest of samples of every parameter on every rank; None where no weights were read."""
    sglang: str
    plugin: str = __version__
    dtype: str
    """Of the weights."""
    kv_dtype: str
    attention: str
    """The prefill attention backend."""
    page_size: int
    settings: Settings


class Bounded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mean over sessions with its bounds; each alone holds with the certificate's confidence."""

    mean: float
    low: float
    high: float


class Certificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured, and what that says."""

    schema_version: int = 1
    name: str
    """Of the settings, on tune's ladder."""
    served: Served
    confidence: float
    budget: float
    """Nats a token: what the mean loss was to stay below."""
    cap: float
    """Nats a token: the most that one session counts."""
    loss: Bounded
    """KL(full prefill || served) in nats, mean over up to 32 forced tokens of one call a session."""
    agreement_loss: Bounded
    """Share of those tokens whose likeliest one is another than the full prefill's, less the same of exact hits."""
    sessions: int
    """That certified it; as many others had chosen the settings."""
    changed_fields: Bounded | Literal["not shown"] = "not shown"
    """The loss of calls behind a changed field alone, one a session; not shown where the logs hold too few of them."""
    reuse: float | None
    """Share of the prefix cache's misses that these settings splice on the logs, by the census."""
    traffic: str
    """Digest of the token ids of the sampled calls."""
    date: str

    def differs_from(self, here: Served) -> list[str]:
        """Why this certificate says nothing of a server, in plain words; empty where it fits."""
        there = self.served
        known = None not in (here.weights, there.weights)
        facts = {
            "model": ("", "") if known else (here.model, there.model),
            "weights": (here.weights, there.weights) if known else ("", ""),
            "SGLang": (here.sglang, there.sglang),
            "sglang_pic": (here.plugin, there.plugin),
            "dtype": (here.dtype, there.dtype),
            "dtype of the KV cache": (here.kv_dtype, there.kv_dtype),
            "attention backend": (here.attention, there.attention),
            "page size": (here.page_size, there.page_size),
        }
        names = dict.fromkeys((*here.settings, *there.settings))
        facts |= {name: (here.settings.get(name), there.settings.get(name)) for name in names}
        return [
            f"{what} {_shown(one)} here, {_shown(other)} there" for what, (one, other) in facts.items() if one != other
        ]

    @property
    def summary(self) -> str:
        """The result in a few words."""
        changed = self.changed_fields
        behind = changed if isinstance(changed, str) else f"at most {changed.high:.4f}"
        return (
            f"{self.name}, a loss of at most {self.loss.high:.4f} nats a token, behind changed fields {behind} "
            f"({self.confidence:.0%}, {self.sessions} sessions, {self.date})"
        )


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate beside the server that it was given to."""

    fits: bool
    said: str
    """One line for the log."""
    here: Served


def policy_settings(policy: ReusePolicy) -> Settings:
    """The reuse policy in a server's settings; not the name of the preset that they come from."""
    return {name: getattr(policy, name) for name in ReusePolicy.__struct_fields__ if name != "preset"}


def read_certificate(path: str | Path) -> Certificate:
    """Read a certificate.

    Raises:
        ConfigError: there is no such file, or it is no certificate that this version can read.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Certificate)
    except OSError as error:
        raise ConfigError(f"{str(path)!r}: {error.strerror}; give the file that sglang-pic tune wrote") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(f"{str(path)!r}: no certificate that this version can read ({error})") from error


def check_certificate(path: str, here: Served) -> Checked:
    """Compare a certificate with a server; one that cannot be read does not fit."""
    try:
        certificate = read_certificate(path)
    except ConfigError as error:
        return _misfit(str(error), here)
    if differs := certificate.differs_from(here):
        return _misfit("; ".join(differs), here)
    unread = "" if here.weights else "; start-up compares the weights"
    return Checked(fits=True, said=f"certificate fits: {certificate.summary}{unread}", here=here)


def _misfit(why: str, here: Served) -> Checked:
    said = f"certificate does not fit: {why}; settings are served as configured, uncertified"
    return Checked(fits=False, said=said, here=here)


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    # Of a digest as much as tells two apart.
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
