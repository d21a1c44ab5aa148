"""The doctor's findings, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a server (a package, the attention backend, ...) and its level of support."""

    area: str
    what: str
    level: str
    """`CPU only` (tested, and on no GPU), `admitted`, `prefix only` or `refused`."""
    reason: str


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All findings for one server, before it is started."""

    command: str
    """The server's command line."""
    machine: str
    findings: list[Finding]
    contract: str
    """Whether SGLang has the functions that the plugin uses, and whether these are the tested ones."""
    computed: list[str]
    """Requests that such a server would compute instead of splicing."""
    certificate: str | None = None
    """Whether the certificate fits, by the flags alone; None if the configuration names none."""
    prefix_only: str = ""
    """Why the server would use SGLang's own cache and splice nothing; empty if it would splice or not start."""
    refused: list[str]
    """The reasons why the server would not start, each with a remedy; empty if it would start."""


OWN_CACHE_ONLY = (
    "--enable-int8-mamba-checkpoint",
    "--enable-kv-cache-sharding",
    "--enable-unified-cache-external-linker",
)
"""Flags that SGLang refuses with any `--radix-cache-backend`, also on prefix-only servers."""
OPEN = "start-up checks on the live model whether rows are moved correctly, what a splice costs and how answers change"


def lines(findings: Findings) -> Iterator[str]:
    """The findings as plain lines; refusals come last."""
    yield findings.command
    yield f"on {findings.machine}"
    yield ""
    shown = [f"{finding.area}: {finding.what}" for finding in findings.findings]
    width = max(map(len, shown), default=0)
    levels = 1 + max(map(len, ("contract", *(finding.level for finding in findings.findings))))
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
        yield "would start as prefix only, with SGLang's own cache: exact prefixes, no splices"
        yield f"  {findings.prefix_only}"
        yield f"  SGLang takes {', '.join(OWN_CACHE_ONLY)} only without --radix-cache-backend"
    else:
        yield "would start; " + OPEN
