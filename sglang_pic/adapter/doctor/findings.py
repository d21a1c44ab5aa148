"""What `sglang-pic doctor` found, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a server (a package, the attention backend, ...), and how far it was tested."""

    area: str
    what: str
    level: str
    """`tested`, `admitted` or `refused`."""
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
    refused: list[str]
    """Why the server would not start, each with what to change; empty where it would."""


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
    for finding, text in zip(findings.findings, shown, strict=True):
        yield f"  {finding.level:<9}{text:<{width}}  {finding.reason}"
    yield f"  {'contract':<9}{findings.contract}"
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
    else:
        yield "would start; " + OPEN
