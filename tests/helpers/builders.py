"""Builders of what the adapter meets in a server: requests, plans, batches, trees, metrics and hooks."""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_pic.adapter.metrics import Metric, Series
from sglang_pic.adapter.serve.account import Accounting
from sglang_pic.adapter.serve.faults import Faults, Recovery
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.forward import ForwardPath
from sglang_pic.adapter.serve.media import TextOnly
from sglang_pic.adapter.serve.modes import Eligibility, Modes
from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.adapter.serve.planning import Limits, Planning
from sglang_pic.adapter.serve.publish import Publication
from sglang_pic.adapter.serve.receive import receive
from sglang_pic.adapter.serve.state import Counts, Epoch, LastPlan, PendingSplice, RequestState
from sglang_pic.adapter.serve.tree import PicRadixCache
from sglang_pic.adapter.sglang.hooks import listed
from sglang_pic.config import PicConfig
from sglang_pic.core import ContentIndex, CoreConfig, Path, Plan, Run, as_tokens

DONOR = Path("donor", [as_tokens(range(4000))])

TRANSLATOR = SimpleNamespace(own_plan=lambda _: SimpleNamespace(bind=lambda *_: None))
"""SGLang's `KVIndexTranslator` of a runner whose slots are rows of its pool."""


class BareRunner:
    """What our passes read of SGLang's model runner, beside its model and its pool of rows."""

    device = "cpu"
    spec_algorithm = None
    lora_manager: Any = None
    shared_read_done_event: object = None
    prefill_cuda_graph_runner = attn_backend = None
    kv_index_translator, prefill_aware_swa = TRANSLATOR, False

    def __init__(self, context_len: int, vocab_size: int = 1_000) -> None:
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros((3, context_len), dtype=torch.int32))
        self.model_config = SimpleNamespace(vocab_size=vocab_size, model_is_mrope=False)


def request(tokens: Iterable[int] = range(300), asked: object = None, **fields: Any) -> Any:
    """SGLang's request as far as the adapter reads it, before anything is computed; `asked` stands under `pic`."""
    ids = array("q", tokens)
    unset = ("input_embeds", "positional_embed_overrides", "multimodal_inputs", "lora_id", "session", "extra_key")
    unset += ("multi_item_delimiter_indices", "token_indices_to_pool", "cache_salt", "finished_reason")
    unset += ("session_id", "routing_key")
    plain: dict[str, Any] = {
        **dict.fromkeys(unset),
        **{"origin_input_ids": ids, "full_untruncated_fill_ids": ids, "output_ids": [], "cached_tokens": 0},
        **{"prefix_len": 0, "extend_end": len(ids), "retracted_stain": False, "return_hidden_states": False},
        **{"host_hit_length": 0, "cached_tokens_host": 0, "cached_tokens_storage": 0},
        **{"return_logprob": False, "logprob_start_len": -1, "rid": "r"},
        "pic": RequestState(RequestOptions()),
        "sampling_params": SimpleNamespace(custom_params=None if asked is None else {"pic": asked}),
    }
    return SimpleNamespace(**{**plain, **fields})


def request_state(**fields: Any) -> RequestState:
    """Ours of a request that asks for nothing; fields of its parts are given by their own names."""
    for name, part in (("counts", Counts), ("last_plan", LastPlan), ("epoch", Epoch)):
        names = getattr(part, "_fields", None) or [each.name for each in dataclasses.fields(part)]
        fields[name] = part(**{each: fields.pop(each) for each in names if each in fields})
    return RequestState(RequestOptions(), **fields)


def plan(prefix_len: int, end: int, *runs: tuple[int, int, int]) -> Plan:
    """A plan with runs `(target_start, target_end, shift)`."""
    taken = (Run(target_start=a, target_end=b, donor_start=a - s, donor=DONOR, seam_len=0) for a, b, s in runs)
    return Plan(prefix_len=prefix_len, end=end, runs=tuple(taken))


def conditional(planned: Plan, *, seam: int = 5) -> Plan:
    """The plan with its runs in another order than in their donors, each after a seam."""
    runs = [msgspec.structs.replace(run, is_conditional=True, seam_len=seam) for run in planned.runs]
    return msgspec.structs.replace(planned, runs=tuple(runs))


def splice(prefix_len: int, end: int, *runs: tuple[int, int, int], slots: int = 900) -> PendingSplice:
    """Such a plan on its way to the pass; the row for position `p` is read from slot `slots + p`."""
    sources = [torch.arange(slots + start, slots + end) for start, end, _ in runs]
    return PendingSplice.on_device(plan(prefix_len, end, *runs), sources)


def scheduled(reqs: Sequence[Any], lens: Sequence[int], **fields: Any) -> Any:
    """The scheduler's batch of whole prompts of these lengths."""
    mode = SimpleNamespace(is_extend=lambda: True, is_extend_without_speculative=lambda: True)
    plain = {"prefix_lens": [0] * len(lens), "extend_lens": lens, "extend_num_tokens": sum(lens)}
    fields = {"multimodal_inputs": None, "batch_size": lambda: len(reqs), **fields}
    return SimpleNamespace(reqs=reqs, forward_mode=mode, **{**plain, "extend_logprob_start_lens": lens, **fields})


def extend_batch(
    lens: list[int],
    *,
    prefix_lens: list[int] | None = None,
    rows: list[int] | None = None,
    to: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    **fields: Any,
) -> Any:
    """What SGLang makes of a batch for a pass: `lens` tokens behind prefixes, with tensors moved by `to`."""
    prefixes, rows = prefix_lens or [0] * len(lens), rows or [*range(len(lens))]
    ends = [prefix + n for prefix, n in zip(prefixes, lens, strict=True)]
    positions = torch.cat([torch.arange(*span) for span in zip(prefixes, ends, strict=True)])
    on_device = {
        "input_ids": torch.arange(sum(lens)),
        "positions": positions,
        "mrope_positions": positions.expand(3, -1).clone(),
        "out_cache_loc": torch.arange(sum(lens)),
        "req_pool_indices": torch.tensor(rows),
        "seq_lens": torch.tensor(ends),
        "orig_seq_lens": torch.tensor(ends, dtype=torch.int32),
        "extend_seq_lens": torch.tensor(lens, dtype=torch.int32),
        "extend_prefix_lens": torch.tensor(prefixes, dtype=torch.int32),
        "extend_start_loc": torch.tensor([sum(lens[:i]) for i in range(len(lens))], dtype=torch.int32),
        "global_num_token_non_padded": torch.tensor(sum(lens), dtype=torch.int32),
    }
    on_host = {
        "req_pool_indices_cpu": torch.tensor(rows),
        "seq_lens_cpu": torch.tensor(ends),
        "seq_lens_sum": sum(ends),
        "extend_num_tokens": sum(lens),
        "extend_seq_lens_cpu": lens,
        "extend_prefix_lens_cpu": prefixes,
        "extend_logprob_start_lens_cpu": lens,
    }
    moved = {name: to(fields.pop(name, tensor)) for name, tensor in on_device.items()}
    return ForwardBatch(forward_mode=ForwardMode.EXTEND, batch_size=len(lens), **{**moved, **on_host, **fields})


def make_pool(kind: str, *, size: int, page_size: int = 1, dtype: torch.dtype = torch.bfloat16, **form: int) -> Any:
    """SGLang's pool of `mha` or `mla` rows on the CPU: one layer of 64 dimensions, if `form` does not say otherwise."""
    make, usual = MHATokenToKVPool, {"head_num": 2, "head_dim": 64, "layer_num": 1}
    if kind == "mla":
        make, usual = MLATokenToKVPool, {"kv_lora_rank": 64, "qk_rope_head_dim": 64, "layer_num": 1}
    return make(
        size=size, page_size=page_size, dtype=dtype, device="cpu", enable_memory_saver=False, **{**usual, **form}
    )


def make_allocator(pool: int, page_size: int, num_windows: int = 0) -> Any:
    """SGLang's allocator of `pool` slots on the CPU, and of `num_windows` in a pool for windows."""
    if num_windows:
        ids = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1]}
        kv = SWAKVPool(
            pool, num_windows, page_size, torch.bfloat16, 1, 8, device="cpu", enable_memory_saver=False, **ids
        )
        return SWATokenToKVPoolAllocator(pool, num_windows, page_size, torch.bfloat16, "cpu", kv, False)
    kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
    sizes = (pool,) if page_size == 1 else (pool, page_size)
    return kind(*sizes, torch.bfloat16, "cpu", None, False)


def make_tree(
    allocator: Any,
    *,
    kind: type[PicRadixCache] = PicRadixCache,
    is_eagle: bool = False,
    window: int | None = None,
    stations: Any = None,
) -> PicRadixCache:
    """Our cache over SGLang's own tree of these slots; for EAGLE a row is named by the next token, too.

    Windows of that many tokens have a pool of their own.
    """
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=SimpleNamespace(),
        token_to_kv_pool_allocator=allocator,
        page_size=allocator.page_size,
        is_eagle=is_eagle,
        tree_components=(ComponentType.FULL,) if window is None else (ComponentType.FULL, ComponentType.SWA),
        sliding_window_size=window,
    )
    return kind(stations or make_stations(), params)


def make_stations(index: Any = None, config: PicConfig | None = None, **ours: Any) -> Any:
    """What stations share, with `ours` in the place of what a server without features and metrics has."""
    index, config = index or ContentIndex(), config or PicConfig()
    made = SimpleNamespace(config=config, index=index, labels=None, ranks=None, series=lambda _: Series((), None))
    made.accounting, made.faults, made.features = Accounting(Series((), None)), Faults(), Features()
    made.modes, made.media = Modes(config), TextOnly()
    vars(made).update(ours)
    made.publication = ours.get("publication") or Publication(index, frozenset())
    made.recovery = Recovery(made.faults, made.accounting, made.publication, made.features)
    made.eligibility = Eligibility(config.core.sink_tokens, made.media, made.modes, made.faults, made.features)
    return made


def make_planning(stations: Any, **others: Any) -> Planning:
    """The planner of a server without host and windows."""
    return Planning(stations, **{"limits": Limits(64, 1 << 24), **others})


def make_path(splicer: Any, *draft_splicers: Any, recover: Callable[..., None] | None = None) -> ForwardPath:
    """The forward passes of a server without features; exceptions are raised, or given to `recover`."""
    recovery: Any = SimpleNamespace(recover=recover or raises)
    return ForwardPath(splicer, Features(), recovery, draft_splicers)


def raises(_: object, __: object, error: Exception, **___: object) -> None:
    raise error


class Broken(Exception):
    """Nothing of ours raises this."""


def fail(*_: object, **__: object) -> None:
    raise Broken("on purpose")


class Kept(Series):
    """Keeps what is counted and set instead of exporting it, by metric and by label."""

    def __init__(self) -> None:
        super().__init__((), None)
        self.counts: Counter[tuple[str, str | None]] = Counter()
        self.levels: defaultdict[tuple[str, str | None], list[float]] = defaultdict(list)

    def add(self, metric: Metric, amount: float = 1, *, value: str | None = None) -> None:
        assert value is None or value in metric.values
        self.counts[metric.name, value] += amount  # type: ignore[assignment]

    def set(self, metric: Metric, amount: float, *, value: str | None = None) -> None:
        self.levels[metric.name, value].append(amount)

    def by_label(self, metric: Metric) -> dict[str | None, int]:
        return {value: count for (name, value), count in self.counts.items() if name == metric.name and count}

    def level(self, metric: Metric, value: str | None = None) -> float:
        """What a metric was set to last."""
        return self.levels[metric.name, value][-1]


def hooks_of(patch: pytest.MonkeyPatch, *modules: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions that these modules install from here on, by when they are called: `after Class.method`."""
    found: dict[str, Callable[..., Any]] = {}

    def keep(owner: str, name: str, function: Callable[..., Any]) -> None:
        target, when = listed(owner, name)
        found.setdefault(f"{when} {'.'.join(target.split('.')[-2:])}", function)

    for module in modules:
        patch.setattr(module, "hook", keep)
    return found


# Another beginning is no changed field here, so that lanes are all that a test sees.
BASE = {"tail_tokens": 0, "seam_tokens": 0, "min_spliced_tokens": 8, "max_field_tokens": 0}


class Tree:
    """Stands for SGLang's tree: one that holds every row that was published, with the locks on it."""

    page_size = 1

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.locks: list[object] = []
        self.collected: list[int] = []
        """Nodes of which the slots were collected."""
        self.tree_core = SimpleNamespace(
            collect_path_info=lambda nodes: [[SimpleNamespace(full_value_len=node)] for node in nodes]
        )

    def match_prefix(self, params: Any) -> Any:
        self.asked.append(params.key.extra_key)
        return SimpleNamespace(last_device_node=len(params.key), device_prefix_len=len(params.key))

    def path_device_indices(self, node: int) -> torch.Tensor:
        self.collected.append(node)
        return torch.arange(node)

    def lock(self, node: int) -> object:
        self.locks.append(receipt := object())
        return receipt

    def unlock(self, receipt: object) -> None:
        self.locks.remove(receipt)


class Server:
    """What the scheduler has of ours, without SGLang's: requests are received, planned and published."""

    def __init__(self, **core: Any) -> None:
        self.config = PicConfig(core=CoreConfig(**{**BASE, **core}))
        self.index, self.tree = ContentIndex(self.config.core), Tree()
        self.stations = make_stations(self.index, self.config)
        self.planning, self.publication = make_planning(self.stations), self.stations.publication

    def receive(self, tokens: list[int], pic: dict[str, Any] | None = None, **fields: Any) -> Any:
        req = request(tokens, pic or {}, **fields)
        receive(req, Features(), self.config.core, Modes(self.config))
        return req

    def plan(self, tokens: list[int], pic: dict[str, Any] | None = None, **fields: Any) -> Any:
        """A request as the scheduler gets it, with its plan."""
        self.planning.plan(req := self.receive(tokens, pic, **fields), self.tree, max_gaps=64)
        return req

    def serve(self, tokens: list[int], pic: dict[str, Any] | None = None, **fields: Any) -> int:
        """Serve a request to its end; how many tokens of it were spliced."""
        req = self.plan(tokens, pic, **fields)
        state: RequestState = req.pic
        num_locked = len(self.tree.locks)
        plan = state.admit(0, len(tokens), first_chunk=True)
        spliced = 0 if plan is None else plan.num_spliced
        assert num_locked == len({run.donor for run in plan.runs} if plan else ()), "what is not spliced is not locked"
        self.publication.publish(req, len(tokens), adopted_from=0)
        state.release_row()
        assert self.tree.locks == []
        return spliced
