"""What a fidelity report says in words: definitions, limits, facts of the run, and the figures of others beside ours.

It must not know Markdown or HTML. The figures of others are quoted from their papers and repositories; ours come from
cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pic_bench.fidelity.numbers import divergence, number, points, share, with_interval
from pic_bench.fidelity.record import Donors, Experiment
from pic_bench.fidelity.summary import Cell, Limits, Summary, seam_of
from pic_bench.fidelity.tables import UNDECIDED, arm_name
from pic_bench.report.tables import Table, plural

__all__ = ["DEFINITIONS", "facts", "limits_of", "marks", "others_table"]

DEFINITIONS = (
    ("full prefill", "every token of the prompt computed, nothing reused: what every other arm is compared with."),
    ("full prefill again", "the same once more: whether the server repeats itself."),
    ("exact hit", "stock SGLang's own prefix hit on the full prefill's rows: the noise floor, which stock has too."),
    ("naive", "rows spliced at their new position with keys as they were at the old one; a seam of one token."),
    ("seam K", "rows spliced and rotated; the first K tokens of every run are computed in their new context."),
    ("default", "what the server splices of its own accord, under its own settings."),
    (
        "donors alone, in context",
        "a block's rows were computed behind an unrelated header alone, or among other blocks.",
    ),
    ("KL", "KL(full prefill || arm) in nats over the whole vocabulary, of the first token after the prompt."),
    ("forced KL", "the same, mean over the positions of the gold continuation, each given the gold tokens before it."),
    ("cosine", "of the first token's logits, each centred on its mean. It hardly tells rotated keys from unrotated."),
    ("top-1", "share of prompts whose likeliest first token is the full prefill's."),
    ("perplexity", "exponential of the gold continuation's mean negative log-likelihood, mean over prompts."),
    ("agreed tokens", "greedy tokens that are the full prefill's before the first that differs."),
    ("K error", "relative L2 of the spliced keys against the full prefill's, all layers; mostly the other context."),
    ("[low, high]", "95 % percentile-bootstrap interval over prompts, on a trace over its sessions; 2,000 resamples."),
    (
        "less floor",
        "the arm less the exact hit (or, without it, the full prefill again), mean of differences by prompt.",
    ),
)


class _Other(NamedTuple):
    who: str
    what: str
    theirs: str
    ours: Callable[[Sequence[Cell]], str]
    differs: str


def marks(limits: Limits) -> str:
    """What the dagger means."""
    return (
        f"{UNDECIDED}: the full prefill itself is not competent here; agreement says little and is left out of the "
        f"claims. A cell is undecided where the median probability of the full prefill's likeliest token is below "
        f"{limits.competent_probability:g}; questions are beyond the model where the full prefill's mean score is "
        f"below {limits.competent_score:g}. Agreement of decided prompts (that probability at least "
        f"{limits.decided_probability:g}) stands beside it."
    )


def limits_of(summary: Summary) -> list[str]:
    """What was left out, and what these figures cannot say."""
    lines = [
        f"{where}: {plural(number, 'prompt')} not spliced as meant, in no figure."
        for where, number in summary.left_out.items()
    ]
    unpaired = [cell for cell in summary.cells if cell.against_floor is not None and cell.against_floor.unpaired]
    if unpaired:
        most = max(cell.against_floor.unpaired for cell in unpaired if cell.against_floor is not None)
        lines.append(
            f"In {plural(len(unpaired), 'cell')} up to {plural(most, 'prompt')} measured in one of arm and floor only: "
            "in the arm's own figures and not in the differences."
        )
    if summary.repeated:
        lines.append(f"{plural(summary.repeated, 'record')} measured again; the last of each counts.")
    marked = sum(cell.undecided or cell.incompetent for cell in summary.cells)
    if marked:
        lines.append(f"Marked {UNDECIDED}: {marked} of {plural(len(summary.cells), 'cell')}.")
    smallest = min((cell.n for cell in summary.cells), default=0)
    if smallest < summary.limits.min_prompts:
        lines.append(
            f"The smallest cell has n = {smallest}. With fewer than {summary.limits.min_prompts} prompts nothing is "
            "claimed, and percentile intervals are too narrow."
        )
    sessions = [cell.num_units for cell in summary.cells if cell.experiment is Experiment.TRACE and cell.num_units]
    if sessions and min(sessions) < summary.limits.min_prompts:
        lines.append(
            f"The calls of a trace come from as few as {plural(min(sessions), 'session')}. Calls of one session "
            "resemble each other, so intervals draw sessions; from fewer than "
            f"{summary.limits.min_prompts} they are too narrow, and nothing is claimed."
        )
    lines.append(
        "Each interval is at 95 % by itself, with no correction for their number: of many cells a few miss by chance."
    )
    lines.append(
        "Where all prompts agree, the interval has no width; about 3 in n may still differ unseen (rule of three)."
    )
    return lines


def facts(summary: Summary) -> list[tuple[str, str]]:
    """What was run, on what."""
    found = [("model", summary.model), ("records", f"{summary.probes:,}")]
    found += [(name, value) for name, value in summary.config.items() if name not in ("schema_version", "model")]
    env = summary.environment
    if env is not None:
        gpus = "; ".join(env.gpus) if env.gpus else "no GPU"
        found += [
            ("machine", f"{env.cpu}, {env.num_cpus} CPUs, {env.memory_bytes / 2**30:.0f} GiB; {gpus}"),
            ("system", f"{env.system}, Python {env.python}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in env.versions.items())),
            ("commit", f"{env.commit}{' with local changes' if env.dirty else ''}" if env.commit else "unknown"),
            ("started", env.started_at),
            ("command", env.command),
        ]
    return found


def others_table(cells: Sequence[Cell]) -> Table:
    """The figures that others give, beside the nearest cell of this run; rows with no such cell are left out."""
    rows = [[o.who, o.what, o.theirs, ours, o.differs] for o in _OTHERS if (ours := o.ours(cells))]
    return Table(["who", "what", "theirs", "here", "what differs"], rows)


def _grid(arm: str, blocks: Callable[[Sequence[int]], int], write: Callable[[Cell], str]) -> Callable[..., str]:
    """Isolated donors, one figure a dtype, at a number of blocks that was measured."""

    def ours(cells: Sequence[Cell]) -> str:
        kept = [c for c in cells if (c.experiment, c.donors, c.arm) == (Experiment.GRID, Donors.ISOLATED, arm)]
        found = []
        for dtype in dict.fromkeys(cell.dtype for cell in kept):
            at = {cell.num_blocks or 0: cell for cell in kept if cell.dtype == dtype}
            cell = at[blocks(sorted(at))]
            found.append(f"{dtype}, {plural(cell.num_blocks or 0, 'block')}: {write(cell)} (n = {cell.n})")
        return "; ".join(found)

    return ours


def _lost_score(cells: Sequence[Cell]) -> str:
    seams = [seam for c in cells if c.experiment is Experiment.QA and (seam := seam_of(c.arm)) is not None]
    longest = f"seam-{max(seams, default=0)}"
    kept = [c for c in cells if c.experiment is Experiment.QA and c.arm == longest and not c.incompetent]
    return "; ".join(
        f"{c.dtype}, {c.source}, {arm_name(c.arm)}: {with_interval(c.score_change, points)} points (n = {c.n})"
        for c in kept
        if c.score_change is not None
    )


def _cosine(cell: Cell) -> str:
    return f"cosine {number(cell.cosine.value)}, top-1 {share(cell.top1.value)}"


def _kl(cell: Cell) -> str:
    return f"KL {divergence(cell.kl.value)}, top-1 {share(cell.top1.value)}"


def _key_error(cell: Cell) -> str:
    return "-" if cell.key_error is None else divergence(cell.key_error.value)


_OTHERS = (
    _Other(
        "programmable-kv (arXiv:2606.17107)",
        "blocks compiled alone, no seam repair",
        "cosine .388, top-1 20 % (Llama-3.1-8B, 16 blocks)",
        _grid("seam-0", lambda blocks: blocks[-1], _cosine),
        "8B model, its own prompts; offline, not in a server",
    ),
    _Other(
        "programmable-kv (arXiv:2606.17107)",
        "one seam token",
        "cosine .9405 without, .9941 with (Llama-3.1-8B, late block)",
        _grid("seam-1", lambda blocks: blocks[0], _cosine),
        "8B model; one block late in the prompt",
    ),
    _Other(
        "moonmath-ai/sglang, port of Irminsul (arXiv:2605.05696)",
        "one run spliced, rotated",
        "KL .0030, argmax 99.2 %; its gate is KL .02 (DeepSeek-V2-Lite, bf16)",
        _grid("seam-1", lambda blocks: blocks[0], _kl),
        "16B MLA model that is surer of its tokens; one contiguous run; no seam repair",
    ),
    _Other(
        "Irminsul (arXiv:2605.05696)",
        "relative L2 of keys",
        ".0047 after rotation (bf16)",
        _grid("seam-1", lambda blocks: blocks[0], _key_error),
        "theirs is rotation alone; ours is against a full prefill and holds the other context too",
    ),
    _Other(
        "CacheBlend (arXiv:2405.16444)",
        "score of questions",
        "7 to 18 % of F1 lost in an independent study, 15 % recomputed",
        _lost_score,
        "larger models and other data; theirs relative to the score, ours in points",
    ),
    _Other(
        "EPIC (ICML 2025)",
        "score of questions",
        "0 to 7 % of accuracy lost, up to 32 tokens of every chunk recomputed",
        _lost_score,
        "larger models and other data; theirs relative to the score, ours in points",
    ),
)
