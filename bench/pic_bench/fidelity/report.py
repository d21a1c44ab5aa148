"""Owns writing a fidelity run's report from its raw records: summary.json, report.md, report.html, plot-*.svg.

It must not start or measure anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pic_bench.compare.summary import write_json
from pic_bench.environment import Environment
from pic_bench.fidelity.cells import make_cells
from pic_bench.fidelity.claims import make_claims
from pic_bench.fidelity.folder import ENVIRONMENT, PROBES, read_environment, read_left_out
from pic_bench.fidelity.panels import Panel, make_panels
from pic_bench.fidelity.record import Experiment, Probe, read_probes
from pic_bench.fidelity.report_html import html_report
from pic_bench.fidelity.report_markdown import headline, markdown_report
from pic_bench.fidelity.sections import parts
from pic_bench.fidelity.summary import Limits, Summary, Worst
from pic_bench.out_folder import CONFIG
from sglang_pic.errors import BenchError

__all__ = ["headline", "summarize", "write_report"]

NUM_WORST = 8
"""Of each experiment."""


def write_report(folder: Path, limits: Limits | None = None) -> Summary:
    """Write the report into a run's folder and return what it shows; plots of an earlier report are deleted.

    Raises:
        BenchError: the folder has no records, or a file in it cannot be read.
    """
    try:
        probes = read_probes(folder / PROBES)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{folder}: no records of a fidelity run ({error}).") from error
    if not probes:
        raise BenchError(f"{folder / PROBES}: no whole record; nothing was measured.")
    config = _read_config(folder / CONFIG)
    if limits is None:
        least = config.get("min_chunk_hit", "")
        limits = Limits(min_chunk_hit=int(least)) if least.isdecimal() else Limits()
    summary = summarize(
        probes,
        limits,
        config=config,
        environment=read_environment(folder) if (folder / ENVIRONMENT).exists() else None,
        left_out=Counter(f"{one.experiment.value}, {one.dtype}" for one in read_left_out(folder)),
    )
    write_json(folder / "summary.json", summary)
    (folder / "report.md").write_text(markdown_report(summary), "utf8")
    (folder / "report.html").write_text(html_report(summary), "utf8")
    for stale in folder.glob("plot-*.svg"):
        stale.unlink()
    for part in parts(summary):
        for picture in part.pictures:
            (folder / f"{picture.name}.svg").write_text(picture.drawing.standalone(), "utf8")
    return summary


def summarize(
    probes: Sequence[Probe],
    limits: Limits,
    *,
    config: dict[str, str],
    environment: Environment | None,
    left_out: dict[str, int],
) -> Summary:
    """What the records come to; the same records in the same order give the same figures."""
    panels, repeated = make_panels(probes, limits)
    return Summary(
        model=Path(config.get("model", "")).name or "an unnamed model",
        probes=len(probes),
        repeated=repeated,
        left_out=left_out,
        limits=limits,
        config=config,
        environment=environment,
        cells=make_cells(panels, limits),
        claims=make_claims(panels, limits),
        worst=_worst(panels, limits),
    )


def _worst(panels: Sequence[Panel], limits: Limits) -> list[Worst]:
    """The highest KL of every experiment under the default setting, each prompt once."""
    found: list[Worst] = []
    for experiment in Experiment:
        spliced = [
            (probe, panel.arm(panel.floor(donors) or "", donors).get(unit))
            for panel in panels
            if panel.experiment is experiment and not panel.min_chunk_hit
            for (donors, arm), records in panel.arms.items()
            if arm in ("seam-1", limits.default_policy)
            for unit, probe in records.items()
        ]
        seen: set[tuple[str, str]] = set()
        for probe, floor in sorted(spliced, key=lambda pair: -pair[0].kl):
            if len(seen) == NUM_WORST:
                break
            if (probe.source, probe.prompt) not in seen:
                seen.add((probe.source, probe.prompt))
                found.append(_as_worst(probe, floor))
    return found


def _as_worst(probe: Probe, floor: Probe | None) -> Worst:
    return Worst(
        experiment=probe.experiment,
        dtype=probe.dtype,
        source=probe.source,
        num_blocks=probe.num_blocks,
        donors=probe.donors,
        shift=probe.shift if probe.experiment is Experiment.SHIFT else None,
        arm=probe.arm,
        prompt=probe.prompt,
        kl=probe.kl,
        floor_kl=None if floor is None else floor.kl,
        top1_agrees=probe.top1_agrees,
        top1_probability=probe.top1_probability,
        prompt_tokens=probe.prompt_tokens,
        chunk_hit_tokens=probe.chunk_hit_tokens,
        text=probe.text,
    )


def _read_config(path: Path) -> dict[str, str]:
    """Every setting as text; nothing where there is no file."""
    if not path.exists():
        return {}
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise BenchError(f"{path}: not a run's settings ({error}).") from error
    return {name: text for name, raw in settings.items() if (text := _as_text(bytes(raw))) not in ("", "null")}


def _as_text(raw: bytes) -> str:
    """A string as it is, a list of strings with commas, anything else as JSON on one line, without its quotes."""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.ValidationError:
        pass
    try:
        return ", ".join(msgspec.json.decode(raw, type=list[str]))
    except msgspec.ValidationError:
        return msgspec.json.format(raw, indent=-1).decode().replace('"', "")
