"""Writes the outcome of a run from its folder alone: the page, the certificate and the configuration that it is of."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from pic_bench.environment import Environment, now
from pic_bench.fidelity.arms import EXACT
from pic_bench.fidelity.pictures import Curve, Picture, plot
from pic_bench.fidelity.record import Probe, read_lines
from pic_bench.out_folder import CONFIG, ENVIRONMENT, read_json, write_json
from pic_bench.report.columns import table_of
from pic_bench.report.numbers import divergence, percent
from pic_bench.report.page import render_pages
from pic_bench.report.stats import Estimate
from pic_bench.tune.bounds import ALPHA
from pic_bench.tune.config import CAP, CERTIFICATE, KIND, NAIVE, PIC_CONFIG, RECORDS, SAMPLE, SERVED, Config, Sample
from pic_bench.tune.ladder import rungs, settings
from pic_bench.tune.verdict import Rung, Verdict, judge, judge_control, sessions_needed
from sglang_pic.certificate import Bounded, Certificate, Served, policy_settings
from sglang_pic.core.policy import ReusePolicy

_COLUMNS = tomllib.loads(Path(__file__).with_name("columns.toml").read_text("utf8"))
_WORD = "of a run of tune that this version can read"


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """summary.json of a run of tune."""

    schema_version: int = 1
    kind: str = KIND
    said: str
    """The outcome in one sentence, to repeat."""
    certified: str | None
    """The boldest rung whose loss was shown to be within the budget, with all before it."""
    needed: int | None
    """Where nothing is certified: sessions to draw that would certify the first rung; None if none would."""
    rungs: list[Rung]
    exact: Rung
    naive: Rung
    config: Config
    sample: Sample
    environment: Environment


def write_report(folder: Path) -> Summary:
    """Write what the records say; a certificate and its configuration only where something is certified.

    Raises:
        BenchError: a file of the folder is missing or cannot be read.
    """
    summary = summarize(folder)
    write_json(folder / "summary.json", summary)
    for name in (CERTIFICATE, PIC_CONFIG):
        (folder / name).unlink(missing_ok=True)
    if (rung := _certified(summary)) is not None:
        policy = settings({each.name: each for each in rungs()}[rung.name])
        served = read_json(folder / SERVED, Served, "what a server serves")
        write_json(folder / CERTIFICATE, _certificate(summary, rung, served, policy))
        changed = {name: value for name, value in policy_settings(policy).items() if value != _DEFAULTS[name]}
        write_json(folder / PIC_CONFIG, _PicConfig(core=changed, certificate=CERTIFICATE))
    picture = _picture(summary)
    title = f"Settings for {Path(summary.config.model).name}"
    shown = [*summary.rungs, summary.exact, summary.naive]
    table = table_of(_COLUMNS, [asdict(rung) | {"is_naive": rung is summary.naive} for rung in shown])
    values = {"summary": summary, "environment": summary.environment, "table": table, "cap": CAP, "alpha": ALPHA}
    pages = render_pages("tune.md.j2", title, {picture.name: picture.drawing}, picture=picture, **values)
    (folder / "report.md").write_text(pages.markdown, "utf8")
    (folder / "report.html").write_text(pages.html, "utf8")
    (folder / f"{picture.name}.svg").write_text(picture.drawing.standalone(picture.title, picture.note), "utf8")
    return summary


def headline(folder: Path) -> str:
    """The outcome in one sentence, and how to serve it."""
    summary = read_json(folder / "summary.json", Summary, _WORD)
    config = folder / PIC_CONFIG
    serve = f"SGLANG_PIC_CONFIG={config} sglang serve {summary.config.model} --radix-cache-backend pic\n"
    return f"{serve if summary.certified else ''}{summary.said}"


def summarize(folder: Path) -> Summary:
    """All figures of a run's records."""
    config, sample = read_json(folder / CONFIG, Config, _WORD), read_json(folder / SAMPLE, Sample, _WORD)
    probes = read_lines(folder / RECORDS, Probe)
    judged = [_judged(rung.name, probes, sample, config.budget) for rung in rungs()]
    naive = judge_control(NAIVE, probes, sample, config.budget)
    tried = [rung for rung in judged if rung.verdict is not Verdict.UNTRIED]
    certified = None
    for rung in tried if naive.verdict is Verdict.OVER else []:
        if rung.verdict is not Verdict.CERTIFIED:
            break
        certified = rung
    per_half = sessions_needed(judged[0].name, probes, config.budget)
    return Summary(
        said=_sentence(config, sample, naive, judged, certified, per_half),
        certified=certified.name if certified else None,
        needed=None if certified or per_half is None else 2 * per_half,
        rungs=judged,
        exact=judge_control(EXACT.name, probes, sample, config.budget),
        naive=naive,
        config=config,
        sample=sample,
        environment=read_json(folder / ENVIRONMENT, Environment, "the environment of a run"),
    )


class _PicConfig(msgspec.Struct, frozen=True):
    """What a server needs to be told."""

    core: dict[str, int | str]
    certificate: str


_DEFAULTS = policy_settings(ReusePolicy())


def _judged(name: str, probes: Sequence[Probe], sample: Sample, budget: float) -> Rung:
    rung = judge(name, probes, sample, budget)
    if rung.verdict is Verdict.UNTRIED:
        return rung
    return msgspec.structs.replace(rung, needed=sessions_needed(name, probes, budget))


def _sentence(
    config: Config, sample: Sample, naive: Rung, judged: Sequence[Rung], certified: Rung | None, per_half: int | None
) -> str:
    model, first = Path(config.model).name, judged[0]
    if certified is not None and certified.loss is not None:
        others = f"; the defaults {percent(first.reuse, 0)}" if certified is not first else ""
        who = f"{certified.name} reuses" if certified is not first else "the defaults reuse"
        return (
            f"On {certified.sessions} of your sessions with {model}, {who} {percent(certified.reuse, 0)} of what the "
            f"prefix cache misses, at a loss of at most {divergence(certified.loss.high)} nats a token "
            f"({percent(1 - ALPHA, 0)}){others}."
        )
    if first.verdict is Verdict.CERTIFIED and naive.sessions:
        return (
            f"Nothing is certified: on {naive.sessions} sessions keys that are not rotated were not shown to lose more "
            f"than {divergence(config.budget)} nats a token, so this measurement would not notice a loss."
        )
    if first.verdict in (Verdict.OVER, Verdict.HOPELESS) or per_half is None:
        loss = first.loss.value if first.loss else first.chosen_loss or 0.0
        return (
            f"Nothing is certified: {model} loses {divergence(loss)} nats a token with the defaults on these logs, "
            f"beyond what shows that it is at most {divergence(config.budget)}."
        )
    return (
        f"Nothing is certified: {sample.sessions} sessions were drawn of {sample.logged}, and it takes about "
        f"{2 * per_half} to show that {model} loses at most {divergence(config.budget)} nats a token with the defaults."
    )


def _certified(summary: Summary) -> Rung | None:
    return next((rung for rung in summary.rungs if rung.name == summary.certified), None)


def _certificate(summary: Summary, rung: Rung, served: Served, policy: ReusePolicy) -> Certificate:
    assert rung.loss is not None
    assert rung.agreement_loss is not None
    return Certificate(
        name=rung.name,
        served=msgspec.structs.replace(served, settings=policy_settings(policy)),
        confidence=1 - ALPHA,
        budget=summary.config.budget,
        cap=CAP,
        loss=_bounded(rung.loss),
        agreement_loss=_bounded(rung.agreement_loss),
        sessions=rung.sessions,
        reuse=rung.reuse,
        traffic=summary.sample.traffic,
        date=now()[:10],
    )


def _bounded(estimate: Estimate) -> Bounded:
    return Bounded(mean=estimate.value, low=estimate.low, high=estimate.high)


def _picture(summary: Summary) -> Picture:
    """A mark for each measured rung: what it reuses, and what it loses."""
    found = [(rung, rung.loss) for rung in summary.rungs if rung.loss is not None]
    series = [Curve(rung.name, [(rung.reuse or 0.0, loss)], "none") for rung, loss in found]
    budget = summary.config.budget
    floor = {"budget": Estimate(value=budget, low=budget, high=budget, n=0)}
    if summary.exact.loss is not None:
        floor["exact hit"] = summary.exact.loss
    title = "Loss against reuse"
    note = "Right reuses more, down loses less. Each bound holds at 95 %; a rung is certified below the budget."
    y_title = f"KL over 32 tokens, at most {CAP} a session, nats"
    x_title = "share of what the prefix cache misses"
    return Picture("plot-tune", title, note, plot(title, series, floor, x_title, y_title=y_title, done="reused"))
