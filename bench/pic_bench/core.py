"""Time of planning one prompt, and memory of the chunk index, beside FastCDC alone.

Correctness first: every timed plan is checked token by token, and the share of the planted repeats that a plan recovers
stands beside the time.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from fastcdc import fastcdc
from pic_traces.encode import load_encoder
from pic_traces.source import SAMPLES, load
from tqdm import tqdm

from pic_bench.report.markdown import Table, markdown_table
from pic_bench.study_command import Finding, Result, Study, at_least, ms, result_of, timed
from sglang_pic.core import MOST_REUSE, ContentIndex, CoreConfig, Lexicon, PlanOptions, RowSource, Tokens
from sglang_pic.core.published import Published
from sglang_pic.errors import BenchError

_VOCABULARY: Final = 49_152
_DOCUMENT_TOKENS: Final = 32_000
_CHUNKS: Final = 100_000
_REPEAT_SHARE: Final = 0.95
_LEAST_RECOVERED: Final = 0.98
# The recovered share is that of a plan that leaves nothing to seams and tail; the timed plan is the server's own.
_MOST_REUSE = PlanOptions(policy=MOST_REUSE)
_NAMESPACE: Final = "bench"
_WARMUP: Final = 3
_PUBLISHED_TOKENS: Final = 32_768
_RATES: Final = (10_000, 50_000, 200_000)


class Case(NamedTuple):
    """Prompts of `num_tokens`, 95 % of them in `num_runs` equally long repeats; none where that is 0."""

    name: str
    num_tokens: int
    num_runs: int


CASES: Final = [
    Case(f"{thousands}k, {({0: 'no hit', 1: '1 run'}).get(runs, f'{runs} runs')}", 1_024 * thousands, runs)
    for thousands, every in ((32, (0, 1, 8, 32, 128)), (128, (0, 1, 128)))
    for runs in every
]
# Agents' text repeats itself, and a changed field is looked for in it.
AGENTS: Final = {
    Case("32k of agents' text, 8 runs", 32_768, 8): False,
    Case("the same, behind a changed field", 32_768, 8): True,
}
_HEAD_TOKENS, _FIELD_AT, _FIELD_TOKENS = 64, 40, 3


Prompts: TypeAlias = Iterator[tuple[ContentIndex, Tokens, int]]
"""An index, a prompt, and how many of its tokens are repeats; without end."""


class CoreTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One case; milliseconds. Earlier records have xxHash's time, too."""

    case: str
    tokens: int
    runs: int
    plans: int
    recovered: float | None
    """Spliced tokens over planted ones, the smallest of all plans."""
    p50_ms: float
    p90_ms: float
    fastcdc_ms: float
    """FastCDC alone over the same bytes, as the chunker feeds them."""


class CoreResult(Result, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The result file."""

    config: dict[str, int | str]
    """As of the version that was measured."""
    index_chunks: int
    index_tokens: int
    bytes_per_token: dict[str, float]
    """Traced memory over indexed tokens, by length of the paths."""
    publish_ms_32k: float
    """Of texts that nobody knows, milliseconds of the thread's processor time."""
    publish_evicting_ms_32k: float | None = None
    """The same in an index that is full; earlier records have none."""
    publish_core_percent: dict[str, float] | None = None
    """That of a core which this takes, by new tokens a second."""
    timings: list[CoreTiming]


STUDY = Study("core", __doc__, seed=1)
STUDY.add("--plans", type=at_least(1), default=60, metavar="N", help="timed plans of each case")


@STUDY.measures
def main(args: argparse.Namespace, _logs: Path) -> Finding:
    """Run the benchmark."""
    rng = np.random.default_rng(args.seed)
    # Its documents stand in another order in each prompt.
    config = CoreConfig(reordered="splice")
    index, documents = _fill_index(config, rng)
    index_chunks = index.size.num_donors
    index_tokens = index.num_tokens
    prompts = {case: _beside(index, partial(make_prompt, rng, documents, case)) for case in CASES}
    prompts |= {case: _agents_prompts(config, rng, case, is_changed) for case, is_changed in AGENTS.items()}
    timings = [_time(made, case, args.plans) for case, made in tqdm(prompts.items(), "plan", file=sys.stderr)]
    fresh = [_random(rng, _PUBLISHED_TOKENS) for _ in range(24)]
    full = msgspec.structs.replace(config, max_index_tokens=8 * _PUBLISHED_TOKENS)
    publish_ms, evicting_ms = (_time_publications(ContentIndex(each), fresh) for each in (config, full))
    core_percent = {f"{rate:,}": evicting_ms * rate / _PUBLISHED_TOKENS / 10 for rate in _RATES}
    memory = {f"{length:,}": _bytes_per_token(config, length) for length in (32_000, 600)}
    result = result_of(
        CoreResult,
        args,
        config=msgspec.to_builtins(config),
        index_chunks=index_chunks,
        index_tokens=index_tokens,
        bytes_per_token=memory,
        publish_ms_32k=publish_ms,
        publish_evicting_ms_32k=evicting_ms,
        publish_core_percent=core_percent,
        timings=timings,
    )
    shown = [
        f"index: {index_chunks:,} chunks, {index_tokens:,} tokens\n",
        markdown_table(_table(timings)),
        f"\npublish 32k new tokens: {publish_ms:.2f} ms, where as many are evicted {evicting_ms:.2f}; of one core "
        + ", ".join(f"{percent:.2f} % at {rate} new tokens a second" for rate, percent in core_percent.items()),
        "memory: " + ", ".join(f"{value:.1f} bytes a token in paths of {name}" for name, value in memory.items()),
    ]
    return Finding(result, "\n".join(shown))


def _publish(index: ContentIndex, tokens: Tokens) -> None:
    """A path that a request has computed whole."""
    index.note(_NAMESPACE, tokens, Published([(0, len(tokens))]))
    index.settle()


def _time_publications(index: ContentIndex, texts: list[Tokens]) -> float:
    """The median over the second half of the texts, when the first half has filled the index."""
    times = []
    for text in texts:
        start = time.thread_time()
        _publish(index, text)
        times.append(time.thread_time() - start)
    return ms(times[len(times) // 2 :])


def _fill_index(config: CoreConfig, rng: np.random.Generator) -> tuple[ContentIndex, list[Tokens]]:
    """An index of `_CHUNKS` chunks or a few more, and the documents in it."""
    index = ContentIndex(config)
    documents: list[Tokens] = []
    with tqdm(total=_CHUNKS, desc="index", unit="chunk", file=sys.stderr) as bar:
        while (known := index.size.num_donors) < _CHUNKS:
            document = _random(rng, _DOCUMENT_TOKENS)
            _publish(index, document)
            documents.append(document)
            bar.update(index.size.num_donors - known)
    return index, documents


def _beside(index: ContentIndex, make: Callable[[], tuple[Tokens, int]]) -> Prompts:
    while True:
        yield index, *make()


def _agents_prompts(config: CoreConfig, rng: np.random.Generator, case: Case, is_changed: bool) -> Prompts:
    """Prompts behind a short head, each beside an index of one document: the head with a value, and the runs' text."""
    text, lexicon = _agents_text()
    run_len = int(case.num_tokens * _REPEAT_SHARE) // case.num_runs
    gap_len = case.num_tokens // case.num_runs - run_len
    while True:
        head = rng.choice(text, _HEAD_TOKENS)
        body = np.resize(np.roll(text, -int(rng.integers(len(text)))), run_len * case.num_runs)
        index = ContentIndex(config, lexicon=lexicon)
        document = np.concatenate([head, body])
        _publish(index, document)
        if is_changed:
            head = head.copy()
            head[_FIELD_AT : _FIELD_AT + _FIELD_TOKENS] = rng.choice(text, _FIELD_TOKENS)
        parts = [[rng.choice(text, gap_len), part] for part in np.split(body, case.num_runs)]
        yield index, np.concatenate([head, *chain.from_iterable(parts)]), len(body)


def _agents_text() -> tuple[Tokens, Lexicon]:
    """The messages of the recorded samples, each once, and the texts of their tokens."""
    encoder = load_encoder(None)
    sessions = chain.from_iterable(load(f"sample:{name}") for name in SAMPLES)
    encoded = [encoder.encode(call) for session in sessions for call in session.calls()]
    messages = [call.tokens[part.start : part.end] for call in encoded for part in call.parts]
    return np.concatenate([*{each.tobytes(): each for each in messages}.values()]), Lexicon(encoder.texts)


def _time(prompts: Prompts, case: Case, num_plans: int) -> CoreTiming:
    times, recovered, cuts = [], [], []
    for index, prompt, num_planted in islice(prompts, _WARMUP + num_plans):
        plan = partial(index.plan, _NAMESPACE, prefix_len=0, rows=RowSource())
        seconds, planned = timed(plan, prompt)
        whole = plan(prompt, options=_MOST_REUSE)
        for run in (*planned.runs, *whole.runs):
            donated = run.donor.tokens()[run.donor_start : run.donor_end]
            if not np.array_equal(donated, prompt[run.target_start : run.target_end]):
                span = f"[{run.target_start}, {run.target_end})"
                raise BenchError(f"run {span} does not equal its donor: no time is shown.")
        recovered.append(whole.num_spliced / num_planted if num_planted else 1.0)
        if recovered[-1] < _LEAST_RECOVERED:
            raise BenchError(f"only {recovered[-1]:.1%} of {num_planted} planted tokens were found: no time is shown.")
        times.append(seconds)
        cuts.append(timed(_cut, prompt, index.config)[0])
    times, cuts = times[_WARMUP:], cuts[_WARMUP:]
    return CoreTiming(
        case=case.name,
        tokens=case.num_tokens,
        runs=case.num_runs,
        plans=num_plans,
        recovered=min(recovered) if case.num_runs else None,
        p50_ms=ms(times),
        p90_ms=ms(times, 90),
        fastcdc_ms=ms(cuts),
    )


def make_prompt(rng: np.random.Generator, documents: list[Tokens], case: Case) -> tuple[Tokens, int]:
    """A prompt of `case`, and how many of its tokens are repeats."""
    if not case.num_runs:
        return _random(rng, case.num_tokens), 0
    run_len = int(case.num_tokens * _REPEAT_SHARE) // case.num_runs
    gap_len = case.num_tokens // case.num_runs - run_len
    parts: list[Tokens] = []
    for _ in range(case.num_runs):
        parts += [_random(rng, gap_len), *_take(rng, documents, run_len)]
    return np.concatenate(parts), run_len * case.num_runs


def _take(rng: np.random.Generator, documents: list[Tokens], num_tokens: int) -> list[Tokens]:
    """A repeat of `num_tokens`; of several documents where one is not long enough. Sinks are no donors."""
    usable = _DOCUMENT_TOKENS - 64
    parts = []
    for document in cycle([documents[i] for i in rng.permutation(len(documents))]):
        length = min(num_tokens, usable)
        start = 64 + int(rng.integers(usable - length + 1))
        parts.append(document[start : start + length])
        num_tokens -= length
        if num_tokens == 0:
            break
    return parts


def _bytes_per_token(config: CoreConfig, path_len: int) -> float:
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        index = ContentIndex(config)
        for _ in range(1_600_000 // path_len):
            _publish(index, _random(rng, path_len))
        return tracemalloc.get_traced_memory()[0] / index.num_tokens
    finally:
        tracemalloc.stop()


def _cut(tokens: Tokens, config: CoreConfig) -> int:
    unit = 256 // config.chunk_avg_tokens
    data = np.repeat(tokens, unit // 4).data.cast("B")
    return len(list(fastcdc(data, config.chunk_min_tokens * unit, 256, config.chunk_max_tokens * unit)))


def _table(timings: list[CoreTiming]) -> Table:
    rows = [
        [
            *(t.case, f"{t.p50_ms:.3f}", f"{t.p90_ms:.3f}"),
            *("-" if t.recovered is None else f"{t.recovered:.2%}", f"{t.p50_ms / t.fastcdc_ms:.2f}"),
        ]
        for t in timings
    ]
    return Table(["prompt", "p50 ms", "p90 ms", "recovered", "x FastCDC"], rows)


def _random(rng: np.random.Generator, num_tokens: int) -> Tokens:
    return rng.integers(3, _VOCABULARY, num_tokens, dtype=np.int32)


if __name__ == "__main__":
    sys.exit(main())
