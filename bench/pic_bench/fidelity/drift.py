"""TURNS turn by turn: whether what a field's old values left in the rows adds up over a conversation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pic_bench.fidelity.compared import Panel
from pic_bench.fidelity.pictures import Picture, slug
from pic_bench.fidelity.record import Experiment
from pic_bench.fidelity.summary import Drift
from pic_bench.fidelity.tables import Titled
from pic_bench.report.figures import LINES, colour, drawing, log_ticks
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import divergence, share, tick

FEWEST_KL = 1e-7
"""A lower KL is drawn as this one."""
WINDOW = 8
"""Turns over which a curve is the mean."""
_TOKENS = ("prompt_tokens", "chunk_hit_tokens", "computed_tokens")
_WIDTH, _ROW, _TOP, _LEFT, _BOTTOM = 250.0, 170.0, 66.0, 62.0, 62.0


def make_drifts(panels: Sequence[Panel]) -> list[Drift]:
    """Every conversation under every policy, its turns in order."""
    found = []
    for panel in (panel for panel in panels if panel.experiment is Experiment.TURNS):
        for arm, records in ((arm, records) for (_, arm), records in panel.arms.items() if arm != "full"):
            probes = sorted(records.values(), key=lambda probe: probe.prompt)
            tokens = {name: [getattr(probe, name) for probe in probes] for name in _TOKENS}
            kl, forced_kl = [probe.kl for probe in probes], [probe.forced_kl or 0.0 for probe in probes]
            top1 = float(np.mean([probe.top1_agrees for probe in probes]))
            drift = Drift(
                dtype=panel.dtype, source=panel.source, arm=arm, **tokens, kl=kl, forced_kl=forced_kl, top1=top1
            )
            found.append(drift)
    return found


def shown(drifts: Sequence[Drift]) -> Iterator[Titled | Picture]:
    """The tables and pictures of TURNS."""
    for dtype in dict.fromkeys(drift.dtype for drift in drifts):
        some = [drift for drift in drifts if drift.dtype == dtype]
        yield Titled(f"KL from the first turns to the last: {dtype}", drift_table(some))
        yield by_turn(some)


def drift_table(drifts: Sequence[Drift]) -> Table:
    """A row for every conversation and policy: KL of the first and last quarter of the turns, and what is reused."""
    header = ["field", "policy", "turns", "spliced", "computed", "KL mean", "first turns", "last turns", "last / first"]
    header += ["answer's KL mean", "last / first", "same first token"]
    rows = []
    for one in drifts:
        total = sum(one.prompt_tokens)
        row = [one.source, one.arm, f"{len(one.kl)}"]
        row += [share(sum(tokens) / total) for tokens in (one.chunk_hit_tokens, one.computed_tokens)]
        first, last = quarters(one.kl)
        row += [divergence(float(np.mean(one.kl))), divergence(first), divergence(last), _ratio(one.kl)]
        rows.append([*row, divergence(float(np.mean(one.forced_kl))), _ratio(one.forced_kl), share(one.top1)])
    return Table(header, rows)


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first quarter and of the last; of 64 turns these are 16 each. The very first has no donors."""
    num = max(1, len(values) // 4)
    return float(np.mean(values[:num])), float(np.mean(values[-num:]))


def by_turn(drifts: Sequence[Drift]) -> Picture:
    """For each way in which the field changes: KL over the turns above, the share that is computed below."""
    sources, arms = (list(dict.fromkeys(getattr(one, name) for one in drifts)) for name in ("source", "arm"))
    title = f"KL and computed tokens over the turns: {drifts[0].dtype}"
    width, height = _LEFT + len(sources) * (_WIDTH + 16), _TOP + 2 * _ROW + _BOTTOM
    with drawing(title, width, height) as (drawn, figure):
        for column, source in enumerate(sources):
            upper, lower = (_axes(figure, column, row, width, height) for row in (0, 1))
            for one in (drift for drift in drifts if drift.source == source):
                line = LINES[arms.index(one.arm) % 5]
                _curve(upper, one.arm, [max(kl, FEWEST_KL) for kl in one.kl], line, divergence)
                shares = [c / p for c, p in zip(one.computed_tokens, one.prompt_tokens, strict=True)]
                _curve(lower, one.arm, shares, line, share)
            upper.set_title(source, fontsize=12, fontweight="normal", color=colour("muted"))
            values = [max(kl, FEWEST_KL) for one in drifts for kl in one.kl[1:]]
            upper.set_ylim(min(values) / 2, max(values) * 2)
            log_ticks(upper, "y", tick)
            lower.set(ylim=(0, 1.04), xlabel="turn")
            lower.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g} %")
            for axes in (upper, lower)[: 2 * bool(column)]:
                axes.set_yticklabels([])
        figure.axes[0].set_ylabel("KL, nats")
        figure.axes[1].set_ylabel("tokens computed")
        figure.axes[0].legend(ncols=len(arms), loc="lower left", bbox_to_anchor=(-0.2, 1.14), fontsize=11)
    note = (
        f"Dots are turns, lines the mean of {WINDOW} turns. The KL is the first token's; below 1e-7 it is drawn there."
    )
    return Picture(slug("turns", drifts[0].dtype), title, note, drawn)


def _axes(figure: Figure, column: int, row: int, width: float, height: float) -> Axes:
    bottom = height - _TOP - _ROW - row * (_ROW + 14)
    left = _LEFT + column * (_WIDTH + 16)
    return figure.add_axes((left / width, bottom / height, _WIDTH / width, _ROW / height))


def _curve(axes: Axes, name: str, values: Sequence[float], line: str, write: Callable[[float], str]) -> None:
    """A dot for every turn from the second on, and the mean of the turns up to it."""
    turns = range(2, len(values) + 1)
    dots = axes.scatter(turns, values[1:], s=12, color=colour(line), alpha=0.45, linewidths=0)
    dots.set_urls([f"{name}, turn {turn}: {write(value)}" for turn, value in zip(turns, values[1:], strict=True)])
    means = [float(np.mean(values[max(1, turn - WINDOW) : turn])) for turn in turns]
    axes.plot(turns, means, color=colour(line), linewidth=2, label=name)


def _ratio(values: Sequence[float]) -> str:
    first, last = quarters(values)
    ratio = last / first if first else math.inf
    return f"{ratio:.2f}" if math.isfinite(ratio) else "-"
