"""Host time of one spliced request, step by step, from its plan to the publication of its rows.

The plan comes from the server's own planning over SGLang's own radix tree, and the batch from the server's own code;
the model and the splice are left out, because a device computes them. Every plan is checked: each row that is to be
moved must be that of an equal token.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from tqdm import tqdm

from pic_bench.core import CASES, fill_index, make_prompt
from pic_bench.report.markdown import Table
from pic_bench.study_command import Finding, Result, Study, at_least, ms, result_of
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.gap_batch import GapBatch, build_gap_batch
from sglang_pic.adapter.serve.media import TextOnly
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.adapter.serve.planning import Limits, Planning
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.adapter.serve.stations import Stations
from sglang_pic.config import PicConfig
from sglang_pic.core import ContentIndex, CoreConfig, Tokens
from sglang_pic.errors import BenchError

_DONORS: Final = Namespace()
# Rows of the measured requests are published here, and forgotten after each.
_PUBLISHED: Final = Namespace("published")
# Cases, and in how many documents the runs of a prompt stand; each is a path of 32,000 tokens in the tree.
_MEASURED: Final = {
    "32k, no hit": (1,),
    "32k, 1 run": (1,),
    "32k, 8 runs": (1, 8),
    "32k, 32 runs": (1, 4, 32),
    "128k, 128 runs": (4,),
}
_WARMUP: Final = 3
STEPS: Final = {
    "plan": "scan the prompt, choose the runs",
    "tree": "match the donors' paths, take and drop locks, gather slots",
    "admit": "clip the plan, count it",
    "lay out": "build the gap batch",
    "narrow": "narrow the forward batch, see it request by request for the logits, and put it back",
    "unlock": "give the donors' locks back",
    "publish": "cut what was computed, make donors of it",
}
BEFORE_LOGITS: Final = tuple(step for step in STEPS if step != "publish")


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of one case; microseconds of processor time of the thread, as other work on the machine shows less."""

    p50_us: float


class HostTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case."""

    case: str
    """With the number of documents that the runs stand in."""
    tokens: int
    num_runs: int
    """That the plan takes; the server's settings limit them."""
    num_spliced: int
    requests: int
    steps: dict[str, Step]
    total_p50_us: float
    """Of all steps up to the logits, request by request."""


class HostResult(Result, frozen=True, kw_only=True):
    """The result file."""

    index_chunks: int
    timings: list[HostTiming]


STUDY = Study("host", __doc__, seed=1)
STUDY.add("--requests", type=at_least(1), default=60, metavar="N", help="timed requests of each case")
STUDY.add("--chunks", type=at_least(1), default=100_000, metavar="N", help="chunks in the index")


@STUDY.measures
def main(args: argparse.Namespace, _logs: Path) -> Finding:
    """Time every step of every case."""
    # Work that a device does in a server must not be timed as work of many threads here.
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    # Its documents stand in another order in each prompt.
    config = PicConfig(core=CoreConfig(reordered="splice"))
    index, documents = fill_index(config.core, rng, namespace=_DONORS, num_chunks=args.chunks)
    host = _Host(index, documents, config)
    timings = []
    for case in CASES:
        for num_documents in _MEASURED.get(case.name, ()):
            chosen = [rng.permutation(len(documents))[:num_documents] for _ in range(_WARMUP + args.requests)]
            prompts = [make_prompt(rng, [documents[i] for i in each], case)[0] for each in chosen]
            name = f"{case.name} of {num_documents}" if case.num_runs > 1 else case.name
            timings.append(_time(host, name, prompts))
    result = result_of(HostResult, args, index_chunks=index.stats().num_donors, timings=timings)
    rows = [
        [*(t.case, str(t.num_runs)), *(f"{step.p50_us:.0f}" for step in t.steps.values()), f"{t.total_p50_us:.0f}"]
        for t in timings
    ]
    return Finding(result, Table(["prompt", "runs", *STEPS, "p50 to the logits, us"], rows))


class _Host:
    """What a scheduler rank has of ours, over SGLang's tree with the rows of `documents`, in their order."""

    def __init__(self, index: ContentIndex, documents: list[Tokens], config: PicConfig) -> None:
        self.index, self.tokens = index, np.concatenate(documents)
        longest = max(case.num_tokens for case in CASES)
        num_slots = len(self.tokens) + longest
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(),  # type: ignore[arg-type]
            token_to_kv_pool_allocator=TokenToKVPoolAllocator(num_slots, torch.bfloat16, "cpu", None, False),
            page_size=1,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(parameters)
        at = 0
        for document in documents:
            key = RadixKey(array("q", document.astype(np.int64).tobytes()), None, cache_salt=None)
            self.tree.insert(InsertParams(key=key, value=torch.arange(at, at + len(document)), prev_prefix_len=0))
            at += len(document)
        self.in_tree = _Stopwatch(self.tree, "match_prefix", "path_device_indices", "lock", "unlock")
        self.table = torch.arange(at, at + longest, dtype=torch.int32).unsqueeze(0)
        self.stations = Stations(config, index, frozenset(), Modes(config), TextOnly())
        self.planning = Planning(self.stations, Limits(4096, 1 << 24))
        self.runner: Any = SimpleNamespace(
            lora_manager=None,
            prefill_aware_swa=False,
            kv_index_translator=KVIndexTranslator(
                req_to_token=self.table,
                token_to_kv_pool_allocator=None,
                token_to_kv_pool=None,
                page_size=1,
                device="cpu",
            ),
        )

    def serve(self, prompt: Tokens) -> tuple[Any, dict[str, float]]:
        """One request, for the caller to look at, and the seconds of its steps."""
        req, total, seconds = _request(prompt), len(prompt), dict.fromkeys(STEPS, 0.0)

        @contextmanager
        def step(name: str) -> Iterator[None]:
            start = time.thread_time()
            yield
            seconds[name] = time.thread_time() - start

        self.in_tree.seconds = 0.0
        with step("plan"):
            self.planning.plan(req, self.tree, max_gaps=4096)
        seconds["tree"] = self.in_tree.seconds
        seconds["plan"] -= seconds["tree"]
        with step("admit"):
            plan = req.pic.admit(0, total, first_chunk=True)
            refusal = self.stations.eligibility.refusal(req)
            self.stations.accounting.count_admitted(req, plan, refusal, first_chunk=True)
            pending = req.pic.take_plan()
        if pending is not None:
            batch = _forward_batch(prompt, self.table)
            with step("lay out"):
                gap = build_gap_batch([pending], [0], [total], [total], [self.table[0]], self.table.device)
            self._check(gap, prompt)
            with step("unlock"):
                gap.locks.close()
            with step("narrow"), gap.narrowed(batch, self.runner):
                gap.per_request_view(batch)
        req.extra_key = _PUBLISHED.extra_key
        with step("publish"):
            self.stations.publication.publish(req, total, adopted_from=0)
        self.index.flush(_PUBLISHED)
        return req, seconds

    def _check(self, gap: GapBatch, prompt: Tokens) -> None:
        src, dst = gap.splice.src.numpy(), gap.splice.dst.numpy() - int(self.table[0, 0])
        if not np.array_equal(self.tokens[src], prompt[dst]) or len(src) + len(gap.kept) != len(prompt):
            raise BenchError("a row that is to be moved is not that of an equal token: no time is shown.")


class _Stopwatch:
    """Adds up the seconds that calls of some methods of an object take; calls inside such a call are part of it."""

    def __init__(self, owner: object, *methods: str) -> None:
        self.seconds, self._is_running = 0.0, False
        for name in methods:
            setattr(owner, name, partial(self._timed, getattr(owner, name)))

    def _timed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_running:
            return call(*args, **kwargs)
        self._is_running, start = True, time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - start
            self._is_running = False


def _time(host: _Host, name: str, prompts: list[Tokens]) -> HostTiming:
    served = [host.serve(prompt) for prompt in tqdm(prompts, name, file=sys.stderr, leave=False)]
    times = [seconds for _, seconds in served[_WARMUP:]]
    totals = [sum(each[step] for step in BEFORE_LOGITS) for each in times]
    by_step = {step: [each[step] for each in times] for step in STEPS}
    spans = served[-1][0].pic.spliced
    return HostTiming(
        case=name,
        tokens=len(prompts[-1]),
        num_runs=len(spans),
        num_spliced=sum(rows.end - rows.start for rows in spans),
        requests=len(times),
        steps={step: Step(p50_us=1e3 * ms(seconds)) for step, seconds in by_step.items()},
        total_p50_us=1e3 * ms(totals),
    )


def _request(prompt: Tokens) -> Any:
    ids = array("q", prompt.astype(np.int64).tobytes())
    return SimpleNamespace(
        **dict.fromkeys(("input_embeds", "positional_embed_overrides", "multimodal_inputs", "lora_id", "session")),
        **dict.fromkeys(("multi_item_delimiter_indices", "token_indices_to_pool", "extra_key", "cache_salt")),
        **dict.fromkeys(("return_logprob", "return_hidden_states", "retracted_stain"), False),
        pic=RequestState(RequestOptions()),
        logprob_start_len=-1,
        storage_hit_start=None,
        origin_input_ids=ids,
        full_untruncated_fill_ids=ids,
        prefix_len=0,
        extend_end=len(ids),
        cached_tokens=0,
    )


def _forward_batch(prompt: Tokens, table: torch.Tensor) -> ForwardBatch:
    """SGLang's forward batch for one whole prompt."""
    total = len(prompt)
    numbers = torch.tensor([total, 0], dtype=torch.int32)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.from_numpy(prompt.astype(np.int64)),
        req_pool_indices=torch.tensor([0]),
        req_pool_indices_cpu=torch.tensor([0]),
        seq_lens=torch.tensor([total]),
        seq_lens_cpu=torch.tensor([total]),
        orig_seq_lens=numbers[:1],
        out_cache_loc=table[0, :total].to(torch.int64),
        seq_lens_sum=total,
        positions=torch.arange(total),
        extend_num_tokens=total,
        extend_seq_lens=numbers[:1],
        extend_seq_lens_cpu=[total],
        extend_prefix_lens=numbers[1:],
        extend_prefix_lens_cpu=[0],
        extend_start_loc=numbers[1:],
        extend_logprob_start_lens_cpu=[total],
        capture_hidden_mode=CaptureHiddenMode.NULL,
        rids=["r"],
        lora_ids=[None],
    )


if __name__ == "__main__":
    sys.exit(main())
