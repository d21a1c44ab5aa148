"""What `sglang-pic doctor` found, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a server would be made of, and how far it was tested."""

    area: str
    what: str
    level: str
    """`tested`, `admitted` or `refused`."""
    reason: str


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be said before a server is started."""

    command: str
    """The server's command line."""
    machine: str
    findings: list[Finding]
    contract: str
    """Whether SGLang has what the plugin uses, and whether it is what was tested."""
    computed: list[str]
    """Requests that such a server would compute instead of splicing."""
    refused: list[str]
    """Why the server would not start, each with what to change; empty where it would."""


OPEN = "only a server can tell: whether rows move rightly, what a splice costs, how answers change (start-up checks it)"


def to_json(findings: Findings) -> str:
    """One JSON object."""
    return msgspec.json.format(msgspec.json.encode(findings), indent=2).decode() + "\n"


def render(findings: Findings) -> str:
    """Plain lines, what stops a server last."""
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
