"""Writes the outcome of a run from its folder alone: the page, the certificate and the configuration that it is of."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace

from pic_bench.environment import now, read_environment
from pic_bench.fidelity.record import Probe, read_lines
from pic_bench.out_folder import CONFIG, read_json, write_json
from pic_bench.report.numbers import JINJA, table_of
from pic_bench.report.page import write_pages
from pic_bench.report.stats import Estimate
from pic_bench.tune.bounds import ALPHA
from pic_bench.tune.config import (
    CAP,
    CERTIFICATE,
    FLIPPED,
    NAIVE,
    PIC_CONFIG,
    RECORDS,
    SAMPLE,
    SERVED,
    Config,
    Sample,
)
from pic_bench.tune.ladder import rungs, settings
from pic_bench.tune.verdict import EXACT, Judge, Rung, Verdict
from sglang_pic.certificate import Bounded, Certificate, Served, policy_settings
from sglang_pic.core.policy import ReusePolicy

_TEXTS = tomllib.loads(Path(__file__).with_name("columns.toml").read_text("utf8"))
_WORD = "of a run of tune that this version can read"


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """summary.json of a run of tune."""

    schema_version: int = 1
    said: str
    """The outcome in one sentence, to repeat."""
    certified: str | None
    """The boldest rung whose loss was shown to be within the budget, with all before it."""
    needed: int | None
    """Sessions to draw that would certify the first rung, as far as its losses tell; None if none would."""
    rungs: list[Rung]
    exact: Rung
    naive: Rung
    flipped: Rung | None = None
    """Measured where the naive control does not fail."""
    config: Config
    sample: Sample


def write_report(folder: Path) -> Summary:
    """Write what the records say; a certificate and a configuration only where something is certified.

    Raises:
        BenchError: a file of the folder is missing or cannot be read.
    """
    summary = summarize(folder)
    for name in (CERTIFICATE, PIC_CONFIG):
        (folder / name).unlink(missing_ok=True)
    if summary.certified is not None:
        _write_certificate(folder, summary)
    controls = [rung for rung in (summary.naive, summary.flipped) if rung]
    rows = [*summary.rungs, summary.exact, *controls]
    shown = [asdict(rung) | {"must_fail": rung in controls} for rung in rows]
    write_pages(
        folder,
        summary,
        "tune.md.j2",
        f"Settings for {Path(summary.config.model).name}",
        environment=read_environment(folder),
        table=table_of(_TEXTS["columns"], shown),
        cap=CAP,
        alpha=ALPHA,
    )
    return summary


def headline(folder: Path) -> str:
    """How to serve what is certified, with the flags that it was measured with, and the outcome in one sentence."""
    summary = read_json(folder / "summary.json", Summary, _WORD)
    if summary.certified is None:
        return summary.said
    config = summary.config
    dtype = () if config.dtype == "auto" else ("--dtype", config.dtype)
    measured = () if config.server else (*dtype, *config.server_args)
    serve = shlex.join(["sglang", "serve", config.model, "--radix-cache-backend", "pic", *measured])
    return f"SGLANG_PIC_CONFIG={shlex.quote(str(folder / PIC_CONFIG))} {serve}\n{summary.said}"


def summarize(folder: Path) -> Summary:
    """All figures of a run's records.

    Raises:
        BenchError: a file of the folder is missing or cannot be read.
    """
    config, sample = read_json(folder / CONFIG, Config, _WORD), read_json(folder / SAMPLE, Sample, _WORD)
    judge = Judge(sample, config.budget, read_lines(folder / RECORDS, Probe))
    judged, naive, flipped = [judge.judge(rung.name) for rung in rungs()], judge.judge(NAIVE), judge.judge(FLIPPED)
    judged = [replace(one, needed=judge.needed(one.name)) if one.chosen_on else one for one in judged]
    certified: Rung | None = None
    for rung in judged if judge.sees_harm else []:
        if rung.verdict not in (Verdict.CERTIFIED, Verdict.UNTRIED):
            break
        certified = rung if rung.verdict is Verdict.CERTIFIED else certified
    half = judge.needed(judged[0].name)
    last = flipped if flipped.sessions else naive
    return Summary(
        said=_said(config, sample, judged, certified, last, half),
        certified=certified.name if certified else None,
        needed=2 * half if half else None,
        rungs=judged,
        exact=judge.judge(EXACT),
        naive=naive,
        flipped=flipped if flipped.sessions else None,
        config=config,
        sample=sample,
    )


def _said(
    config: Config, sample: Sample, judged: list[Rung], certified: Rung | None, last: Rung, half: int | None
) -> str:
    """The outcome in one sentence."""
    text = _TEXTS["said"]["certified" if certified else "nothing"]
    values = {"rung": certified, "first": judged[0], "control": last, "sample": sample, "half": half}
    behind = _shown_changed(config, certified) if certified else None
    model, confidence = Path(config.model).name, 1 - ALPHA
    return JINJA.from_string(text).render(values, model=model, budget=config.budget, behind=behind, sure=confidence)


def _shown_changed(config: Config, rung: Rung) -> Estimate | None:
    """The loss behind changed fields where it is shown to be within the budget."""
    return rung.changed_loss if rung.changed_loss and rung.changed_loss.high < config.budget else None


def _write_certificate(folder: Path, summary: Summary) -> None:
    """That of the boldest certified settings, and their configuration."""
    (rung,) = (rung for rung in summary.rungs if rung.name == summary.certified)
    certificate, defaults = _certificate(folder, summary, rung), policy_settings(ReusePolicy())
    core = {name: value for name, value in certificate.served.settings.items() if value != defaults[name]}
    write_json(folder / CERTIFICATE, certificate)
    write_json(folder / PIC_CONFIG, {"core": core, "certificate": CERTIFICATE})


def _certificate(folder: Path, summary: Summary, rung: Rung) -> Certificate:
    policy = settings({each.name: each for each in rungs()}[rung.name])
    assert rung.loss is not None, "it was measured"
    assert rung.agreement_loss is not None, "exact hits come first"
    return Certificate(
        name=rung.name,
        served=replace(read_json(folder / SERVED, Served, "what a server serves"), settings=policy_settings(policy)),
        confidence=1 - ALPHA,
        budget=summary.config.budget,
        cap=CAP,
        loss=_bounded(rung.loss),
        agreement_loss=_bounded(rung.agreement_loss),
        changed_fields=_bounded(behind) if (behind := _shown_changed(summary.config, rung)) else "not shown",
        sessions=rung.sessions,
        reuse=rung.reuse,
        traffic=summary.sample.traffic,
        date=now()[:10],
    )


def _bounded(estimate: Estimate) -> Bounded:
    return Bounded(mean=estimate.value, low=estimate.low, high=estimate.high)
