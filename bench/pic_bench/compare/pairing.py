"""The same calls of two arms side by side, and every figure that is computed from pairs or totals.

The docstrings here define the figures; the report repeats them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from pic_replay.records import ReplaySummary, RequestRecord, Status

from pic_bench.compare.summary import ArmKind, ArmSummary, Bucket, Figures, Kl, Measured, Paired, Summary
from pic_bench.out_folder import without_secrets
from pic_bench.report.stats import common_len, median, merge_tokens, ratio, top_k_kl

BUCKET_EDGES = (0, 1, 256, 1000, 4000)
AT_LEAST = (256, 1000)


class Pair(NamedTuple):
    """The same call, with the same prompt, in the baseline and in the compared arm, both answered."""

    base: RequestRecord
    arm: RequestRecord

    @property
    def speedup(self) -> float | None:
        """Baseline TTFT / arm TTFT."""
        return ratio(self.base.ttft_s or 0.0, self.arm.ttft_s or 0.0)

    @property
    def same_output(self) -> bool:
        """Whether the whole answers are equal, character by character."""
        return self.base.output_text == self.arm.output_text

    @property
    def same_first_token(self) -> bool | None:
        """Whether the first token is the same; None where it was not recorded."""
        a, b = first_token(self.base), first_token(self.arm)
        return None if a is None or b is None else a == b

    @property
    def same_len(self) -> int:
        """Characters before the answers part."""
        return common_len(self.base.output_text, self.arm.output_text)

    @property
    def kl(self) -> float | None:
        """KL of the first token's top-k lists, baseline against arm, in nats."""
        return top_k_kl(
            merge_tokens(self.base.first_top_logprobs or ()), merge_tokens(self.arm.first_top_logprobs or ())
        )


def first_token(record: RequestRecord) -> str | int | None:
    """The first token of the greedy answer; where no ids were recorded, the likeliest one.

    In bf16 the likeliest tokens are often tied: only the answer itself says which one the server took.
    """
    if record.output_token_ids:
        return record.output_token_ids[0]
    if record.first_top_logprobs:
        return max(record.first_top_logprobs, key=lambda pair: pair[1])[0]
    return None


def answered(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests that were measured and answered."""
    return [record for record in records if record.status is Status.OK and not record.warmup]


def pair_records(base: Sequence[RequestRecord], arm: Sequence[RequestRecord]) -> list[Pair]:
    """The calls that both arms answered, by (session, call), in the baseline's order.

    A call whose prompt differs between the arms is no pair: `Paired.prompts_differ` counts these.
    """
    return [pair for pair in _same_calls(base, arm) if pair.base.prompt_key == pair.arm.prompt_key]


def compare_arms(base_name: str, base: Sequence[RequestRecord], arm_name: str, arm: Sequence[RequestRecord]) -> Paired:
    """Every paired figure of two arms."""
    pairs = pair_records(base, arm)
    bounds = zip(BUCKET_EDGES, (*BUCKET_EDGES[1:], None), strict=True)
    return Paired(
        **_figures(pairs),
        baseline=base_name,
        arm=arm_name,
        prompts_differ=len(_same_calls(base, arm)) - len(pairs),
        first_token_kl=_kl(_values(pairs, "kl")),
        by_chunk_hit_tokens=[_bucket(pairs, low, high) for low, high in bounds],
        at_least_chunk_hit_tokens=[_bucket(pairs, low, None) for low in AT_LEAST],
        from_second_call=Figures(**_figures([pair for pair in pairs if pair.base.call > 0])),
    )


def compare_all(measured: Measured, records: Mapping[str, Sequence[RequestRecord]]) -> Summary:
    """The measurements, with the arms compared by their records."""
    kinds = {name: arm.kind for name, arm in measured.arms.items()}
    # Not stock-cold: nobody serves agents without a prefix cache.
    stock = [name for name, kind in kinds.items() if kind in {ArmKind.STOCK, ArmKind.STOCK_AGAIN}]
    base = [*stock, *kinds][0]
    others = [name for name in kinds if name != base]
    comparisons = {name: compare_arms(base, records[base], name, records[name]) for name in others}
    patched = [name for name in others if kinds[name] is ArmKind.PIC] if stock else []
    # Prefix hits alone change stock's answers: stock with none of them is the better floor of the two.
    floors = [name for name in others if kinds[name].is_stock] if stock else []
    floors.sort(key=lambda name: kinds[name] is not ArmKind.STOCK_COLD)
    return Summary(
        **msgspec.structs.asdict(measured),
        paired=comparisons[patched[0]] if patched else None,
        comparisons=list(comparisons.values()),
        noise_floor=floors[0] if floors else None,
    )


def summarize_arm(
    replayed: ReplaySummary,
    records: Sequence[RequestRecord],
    *,
    kind: ArmKind,
    ready_s: float,
    server_args: Sequence[str],
    pic_counters: dict[str, float],
) -> ArmSummary:
    """One arm's totals, as its replay has them, and why requests failed and calls were left out."""
    told, fields = msgspec.structs.asdict(replayed), ArmSummary.__struct_fields__
    # Where a server told nothing of its cache, nothing was a hit.
    totals: dict[str, Any] = {name: 0 if value is None else value for name, value in told.items() if name in fields}
    measured = [record for record in records if not record.warmup]
    failed = [record for record in measured if record.status in {Status.FAILED, Status.INTERRUPTED}]
    skipped = [record for record in measured if record.status is Status.SKIPPED]
    # Those that differ only in the prompt's length are one kind.
    reasons = [re.sub(r"^prompt of \d+ tokens", "prompt", _one_line(r.reason or "no reason given")) for r in skipped]
    totals |= {"requests": replayed.completed + len(failed), "failed": len(failed)}
    return ArmSummary(
        **totals,
        kind=kind,
        ready_s=ready_s,
        server_args=without_secrets(server_args),
        skipped_reasons=dict(Counter(reasons).most_common()),
        errors=dict(Counter(_one_line(r.error or r.status.value) for r in failed).most_common()),
        pic_counters=pic_counters,
    )


def _same_calls(base: Sequence[RequestRecord], arm: Sequence[RequestRecord]) -> list[Pair]:
    others = {(r.session_id, r.call): r for r in answered(arm)}
    return [Pair(r, others[r.session_id, r.call]) for r in answered(base) if (r.session_id, r.call) in others]


def _figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    base, arm = [pair.base for pair in pairs], [pair.arm for pair in pairs]
    base_computed, computed = (sum(_values(records, "computed_tokens")) for records in (base, arm))
    return {
        "requests": len(pairs),
        "baseline_ttft_p50_s": median(_values(base, "ttft_s")),
        "ttft_p50_s": median(_values(arm, "ttft_s")),
        "ttft_speedup_p50": median(_values(pairs, "speedup")),
        "baseline_computed_tokens": base_computed,
        "computed_tokens": computed,
        "computed_tokens_ratio": ratio(computed, base_computed),
        "first_token_agreement": _share(pairs, "same_first_token"),
        "output_agreement": _share(pairs, "same_output"),
    }


def _bucket(pairs: Sequence[Pair], low: int, high: int | None) -> Bucket:
    inside = [pair for pair in pairs if (hit := pair.arm.chunk_hit_tokens or 0) >= low and (high is None or hit < high)]
    return Bucket(low=low, high=high, **_figures(inside))


def _values(found: Sequence[Pair | RequestRecord], name: str) -> list[float]:
    """A field of pairs or records, where it was measured."""
    return [value for one in found if (value := getattr(one, name)) is not None]


def _share(pairs: Sequence[Pair], name: str) -> float | None:
    """The share of pairs for which a field is true, of the pairs for which it is known."""
    return ratio(sum(found := _values(pairs, name)), len(found))


def _kl(values: Sequence[float]) -> Kl | None:
    if not values:
        return None
    p50, p99, most = map(float, np.percentile(values, [50, 99, 100]))
    return Kl(requests=len(values), p50=p50, p99=p99, max=most)


def _one_line(message: str) -> str:
    return " ".join(message.split())[:200]
