"""What `sglang-pic doctor` found, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a server (a package, the attention backend, ...), and how far it was tested."""

    area: str
    what: str
    level: str
    """`tested`, `admitted`, `prefix only` or `refused`."""
    reason: str


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before a server is started."""

    command: str
    """The server's command line."""
    machine: str
    findings: list[Finding]
    contract: str
    """Whether SGLang has the functions that the plugin uses, and whether these are the tested ones."""
    computed: list[str]
    """Requests that such a server would compute instead of splicing."""
    certificate: str | None = None
    """Whether a certificate fits, as far as flags tell; None where the configuration asks for none."""
    prefix_only: str = ""
    """Why the server would get SGLang's own cache and splice nothing; empty where it would splice, or not start."""
    refused: list[str]
    """Why the server would not start, each with what to change; empty where it would."""


OWN_CACHE_ONLY = (
    "--enable-int8-mamba-checkpoint",
    "--enable-kv-cache-sharding",
    "--enable-unified-cache-external-linker",
)
"""What SGLang refuses beside any `--radix-cache-backend`, although a server that is prefix only has SGLang's cache."""
OPEN = "start-up checks on the live model whether rows move rightly, what a splice costs and how answers change"


def to_json(findings: msgspec.Struct) -> str:
    """One JSON object."""
    return msgspec.json.format(msgspec.json.encode(findings), indent=2).decode() + "\n"


def render(findings: Findings) -> str:
    """Plain lines; refusals come last."""
    return "".join(f"{line}\n" for line in _lines(findings))


def _lines(findings: Findings) -> Iterator[str]:
    yield findings.command
    yield f"on {findings.machine}"
    yield ""
    shown = [f"{finding.area}: {finding.what}" for finding in findings.findings]
    width = max(map(len, shown), default=0)
    levels = 1 + max(len(level) for level in ("contract", *(finding.level for finding in findings.findings)))
    for finding, text in zip(findings.findings, shown, strict=True):
        yield f"  {finding.level:<{levels}}{text:<{width}}  {finding.reason}"
    yield f"  {'contract':<{levels}}{findings.contract}"
    if findings.certificate:
        yield f"  {findings.certificate}"
    if findings.computed:
        yield ""
        yield "computed, not spliced:"
        yield from (f"  {line}" for line in findings.computed)
    yield ""
    if findings.refused:
        yield f"would not start, {len(findings.refused)} refused:"
        yield from (f"  {line}" for line in findings.refused)
    elif findings.prefix_only:
        yield "would start as prefix only, with SGLang's own cache: exact prefixes as on stock, no splices"
        yield f"  {findings.prefix_only}"
        yield f"  SGLang takes {', '.join(OWN_CACHE_ONLY)} only without --radix-cache-backend"
    else:
        yield "would start; " + OPEN
