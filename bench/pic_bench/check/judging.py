"""Judges cached answers by cold ones: the distance of each pair, the noise beside it, and whether it is beyond that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import msgspec
from scipy.stats import binomtest

from pic_bench.check.sending import Cold, Sender, Sendings, Sent
from pic_bench.report.markdown import Table
from pic_bench.report.stats import common_len, median, top_k_kl

LEAST_LIMIT = 0.05
"""Nats: a KL of one token up to here is never called wrong."""
_TIMES_NOISE = 3.0
_MOST_LIKELY = 0.01
"""Of answers without logprobs: so often an honest cache may be called wrong."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers to one prompt.

    Args:
        kl: the largest KL of a token's distribution in nats, up to the first token that differs; None without logprobs.
        at: the token it is of.
        cached_tokens: of the second answer's prompt; None where the server does not say.
    """

    session_id: str
    call: int
    is_same: bool
    kl: float | None
    at: int | None
    prompt_tokens: int
    cached_tokens: int | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared and found.

    Args:
        cold: what made prompts cold.
        noise: the same prompts twice, the second time among others: both cold, or with first lines both cached.
        again: cold beside cached as a whole.
        grown: cold beside cached as far as the session's earlier calls go.
        limit: the KL in nats beyond which a pair of `again` or `grown` is wrong; None without logprobs.
        wrong: these pairs; without logprobs those of `again`, or of `grown`, that differ, if more do than of noise.
    """

    base_url: str
    model: str
    trace: str
    cold: str
    max_tokens: int
    num_top: int
    skipped: int
    noise: list[Pair]
    again: list[Pair]
    grown: list[Pair]
    limit: float | None
    wrong: list[Pair]


def judge(sender: Sender, sendings: Sequence[Sendings], *, base_url: str, trace: str, max_tokens: int) -> Result:
    """Compare the answers; pairs of which the server says that nothing was cached do not count as cached."""
    noise = [_pair(each, each.again if sender.cold is Cold.FIRST_LINE else each.cold, each.others) for each in sendings]
    again = [_pair(each, each.cold, each.again) for each in sendings if each.again.cached_tokens != 0]
    grown = [
        _pair(each, each.cold, each.grown)
        for each in sendings
        if each.grown is not None and each.grown.cached_tokens != 0
    ]
    limit = max(LEAST_LIMIT, _TIMES_NOISE * max(_kls(noise), default=0.0)) if _kls([*again, *grown]) else None
    return Result(
        base_url=base_url,
        model=sender.info.model,
        trace=trace,
        cold=sender.cold.value,
        max_tokens=max_tokens,
        num_top=sender.num_top,
        skipped=len(sender.skipped),
        noise=noise,
        again=again,
        grown=grown,
        limit=limit,
        wrong=_wrong(noise, [again, grown], limit),
    )


def table_of(result: Result) -> Table:
    """A row for each way to send a prompt the second time."""
    first_line = result.cold == Cold.FIRST_LINE.value
    named = {
        f"noise: {'cached' if first_line else 'cold'} beside the same among others": result.noise,
        "cold beside the same again": result.again,
        "cold beside after its session": result.grown,
    }
    header = ["pairs", "n", "prompt tokens", "cached", "same answer", "KL p50", "KL max"]
    return Table(header, [_row(name, pairs) for name, pairs in named.items() if pairs])


def sentences(result: Result) -> Iterator[str]:
    """What was compared, where answers differ beyond noise, and what that means."""
    compared = f"{result.max_tokens} greedy tokens" + (f" with {result.num_top} logprobs" if result.num_top else "")
    yield f"Compared: {compared} to {len(result.noise)} prompts of {result.trace} on {result.model}, {result.base_url}."
    yield f"A prompt is cold by {result.cold}." + (f" {result.skipped} were too long." if result.skipped else "")
    if any(pair.cached_tokens is None for pair in result.again):
        yield "The server does not say what was cached (SGLang: --enable-cache-report; vLLM: "
        yield "--enable-prompt-tokens-details): a second sending is taken for a cached one."
    for pair in result.wrong:
        kl = "" if pair.kl is None else f" KL {pair.kl:.3g} at token {pair.at},"
        cached = f"{'?' if pair.cached_tokens is None else f'{pair.cached_tokens:,}'} of {pair.prompt_tokens:,} tokens"
        yield f"WRONG: session {pair.session_id}, call {pair.call}:{kl} {cached} cached"
    rule = "differ more often than noise does" if result.limit is None else f"are beyond a KL of {result.limit:.3g}"
    checked = len(result.again) + len(result.grown)
    yield f"{len(result.wrong)} of {checked} cached answers {rule}."


def _pair(sendings: Sendings, base: Sent, other: Sent) -> Pair:
    # Several tokens are parts of characters, which all have this text.
    told = list(takewhile(lambda token: "\ufffd" not in token, base.tokens))
    same = common_len(told, other.tokens)
    tops = zip(base.tops[: same + 1], other.tops[: same + 1], strict=False)
    kls = [kl for one, two in tops if (kl := top_k_kl(one, two)) is not None]
    return Pair(
        session_id=sendings.call.session_id,
        call=sendings.call.index,
        is_same=base.text == other.text,
        kl=max(kls, default=None),
        at=kls.index(max(kls)) if kls else None,
        prompt_tokens=other.prompt_tokens,
        cached_tokens=other.cached_tokens,
    )


def _wrong(noise: Sequence[Pair], kinds: Sequence[Sequence[Pair]], limit: float | None) -> list[Pair]:
    if limit is not None:
        return [pair for pairs in kinds for pair in pairs if pair.kl is not None and pair.kl > limit]
    # NOTE: each kind by itself: a call that was sent from the cache twice has two chances to differ, its noise has one.
    level = _MOST_LIKELY / max(1, sum(map(bool, kinds)))
    return [pair for pairs in kinds if _differs_more(noise, pairs, level) for pair in pairs if not pair.is_same]


def _differs_more(noise: Sequence[Pair], cached: Sequence[Pair], level: float) -> bool:
    """Whether cached answers differ in more calls than noise does in these: an exact test of the calls of one alone."""
    calls = {(pair.session_id, pair.call) for pair in cached}
    differing, noisy = ({(p.session_id, p.call) for p in pairs if not p.is_same} & calls for pairs in (cached, noise))
    either = len(differing ^ noisy)
    return bool(either) and binomtest(len(differing - noisy), either, alternative="greater").pvalue <= level


def _kls(pairs: Sequence[Pair]) -> list[float]:
    return [pair.kl for pair in pairs if pair.kl is not None]


def _row(name: str, pairs: Sequence[Pair]) -> list[str]:
    kls, told = _kls(pairs), [pair.cached_tokens for pair in pairs if pair.cached_tokens is not None]
    middle = median(kls)
    return [
        name,
        str(len(pairs)),
        f"{sum(pair.prompt_tokens for pair in pairs):,}",
        f"{sum(told):,}" if told else "?",
        f"{sum(pair.is_same for pair in pairs)}",
        "-" if middle is None else f"{middle:.2g}",
        f"{max(kls):.2g}" if kls else "-",
    ]
