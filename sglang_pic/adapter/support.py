"""What the plugin was tested with, what it admits untested, and what it refuses when the server starts.

One table, because start-up checks it and the reference page prints it; most of it is in `support.toml`.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator, Sequence
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.sglang.bodies import known_versions
from sglang_pic.adapter.sglang.contract import (
    BUILT_FOR,
    FEATURES,
    changed_attention,
    check_contract,
    describe_changes,
)
from sglang_pic.adapter.sglang.seams import BuildContext, ModelRunner
from sglang_pic.errors import Refused, UnsupportedError
from sglang_pic.runtime.rope import (
    KNOWN_EMBEDDINGS,
    MODEL_EMBEDDINGS,
    REFUSED_EMBEDDINGS,
    REFUSED_LAYERS,
    UNKNOWN_EMBEDDING,
)
from sglang_pic.runtime.views import KNOWN_POOLS, OTHER_ROWS, PLAIN_LAYOUT, REFUSED_POOLS, UNKNOWN_POOL

logger = logging.getLogger(__name__)


class Area(Enum):
    """What an entry of the matrix is about."""

    SGLANG = "SGLang"
    PACKAGE = "packages"
    MODEL = "models"
    EMBEDDING = "rotary embeddings"
    ATTENTION = "prefill attention backends"
    POOL = "KV pools"
    TOPOLOGY = "topology"
    FEATURE = "features"


class Level(Enum):
    """How far something is supported."""

    TESTED = "tested with every commit, on CPUs"
    FALLS_BACK = "computed as stock SGLang computes it, and counted by reason"
    ADMITTED = "admitted by its sources, not run yet"
    PREFIX_ONLY = "served by SGLang's own cache: exact prefixes, no splices"
    REFUSED = "refused when the server starts"

    @property
    def shown(self) -> str:
        """What tables call it."""
        return self.name.lower().replace("_", " ")


class Support(NamedTuple):
    """One entry of the matrix."""

    area: Area
    level: Level
    what: str
    reason: str
    """One clause: why this is admitted or refused, or what was tested."""
    path: str = ""
    """The path in SGLang's `TreeCacheBuildContext` of the value that tells whether a server has this: a server argument
    as SGLang resolved it, or a value of `environ` or `platform`. Empty if it is found otherwise, or every
    server has it. A space separates several."""
    served: object = False
    """The value at `path` of a server without it; `False` stands for whatever counts as false. A list has all values of
    servers without it, and `""` for whatever counts as false."""
    values: Sequence[str] = ()
    """The values at `path` of servers with it; empty if these are all others."""
    beside: str = ""
    """The path of a second value that a server must have, too; a space separates several, of which one is enough."""
    unless: str = ""
    """The path of a value that a server with this must not have."""
    change: str = ""
    """What to do about a refusal."""
    feature: str = ""
    """Its name in OPERATE.md; empty if that is `what`, or if only the reference page names it."""
    fallback: str = ""
    """The reason that counts its requests that fall back."""
    modes: Sequence[str] = ("null", "prefill")
    """Values of `--disaggregation-mode` under which it is refused, or its `contract` checked; a decode server splices
    nothing."""
    contract: str = ""
    """The table of `contract.FEATURES` with the symbols that only servers with this rely on."""

    @property
    def refused(self) -> Refused:
        """The reason and the change of a refusal."""
        return Refused(self.reason, self.change)


def _read_table() -> Iterator[Support]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf8"))
    for level in Level:
        for area in Area:
            for what, row in table.get(level.name.lower(), {}).get(area.name.lower(), {}).items():
                if isinstance(row, str):
                    yield Support(area, level, what, row)
                elif level is Level.FALLS_BACK:
                    (reason,) = (each.description for each in Fallback if each.value == row["fallback"])
                    yield Support(area, level, what, **{"reason": reason} | row)
                elif level is not Level.REFUSED:
                    yield Support(area, level, what, **row)
                elif what.startswith("--"):
                    flag = {"path": "server_args." + what.lstrip("-").replace("-", "_"), "change": "remove it"}
                    yield Support(area, level, what, **flag | row)
                else:
                    yield Support(area, level, what, **{"change": Refused("").change} | row)


def _read_runtime() -> Iterator[Support]:
    for version in known_versions():
        if version == BUILT_FOR:
            yield Support(Area.SGLANG, Level.TESTED, version, "every test runs on it")
        else:
            reason = "an earlier commit was tested on it; `sglang-pic doctor` says what it lacks for this one"
            yield Support(Area.SGLANG, Level.ADMITTED, version, reason)
    for name in (*KNOWN_EMBEDDINGS, *MODEL_EMBEDDINGS):
        if name in _MOVED_ON_SERVERS:
            yield Support(Area.EMBEDDING, Level.TESTED, name, "keys are moved on servers")
        else:
            yield Support(Area.EMBEDDING, Level.ADMITTED, name, "start-up compares it with the module's own table")
    for name, kind in KNOWN_POOLS.items():
        yield Support(Area.POOL, Level.TESTED, name, f"holds {kind.name}")
    for trait, reason in REFUSED_LAYERS.items():
        yield _refused(Area.MODEL, f"an attention layer {trait}", Refused(reason))
    for name, reason in (REFUSED_EMBEDDINGS | {"any other": UNKNOWN_EMBEDDING}).items():
        yield _refused(Area.EMBEDDING, name, Refused(reason))
    yield _refused(Area.POOL, "rows of any other dtype", OTHER_ROWS)._replace(feature="fp8_e5m2 and FP4 pools")
    for name, plain, refused in PLAIN_LAYOUT:
        yield _refused(Area.POOL, f"{name} other than {plain[0]!r}", refused)
    for name, refused in (REFUSED_POOLS | {"any other": UNKNOWN_POOL}).items():
        yield _refused(Area.POOL, name, refused)


def _refused(area: Area, what: str, refused: Refused) -> Support:
    return Support(area, Level.REFUSED, what, refused.reason, change=refused.change)


_MOVED_ON_SERVERS: Final = (
    "DeepseekScalingRotaryEmbedding",
    "Gemma3RotaryEmbedding",
    "MRotaryEmbedding",
    "RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)


SUPPORT: Final = (*_read_table(), *_read_runtime())
"""Everything that is tested, admitted or refused."""

_MOST_IN_TABLE: Final = 1 << 24
"""Entries of a gap batch's page table, which has a row as long as the longest sequence for each of them: 64 MiB."""
_MOST_SCORED: Final = 1 << 19
"""Likewise for `dsa`, whose indexer gathers the keys of all sequences, 132 bytes each, and has a column of fp32 scores
for each: 66 MiB beside all that SGLang keeps memory for, and 1,024 tokens at a time where it has 2 GiB for scores. Four
sequences of 128k tokens have so many.
"""
_MOST_GATHERED_BYTES: Final = 1 << 28
"""Likewise where `dsa` also gathers a layer's rows for its kernels: two sequences of 100k tokens as bfloat16, of which
SGLang's own pass over that prompt has one.
"""
_DEQUANTISING: Final = ("flashmla_sparse", "triton_sparse_mla")
_WITH_SEQUENCE_TABLES: Final = ("triton", "flashinfer", "trtllm_mha")
"""Attention backends with tables, or counters, for as many sequences as the request pool has rows."""
_UNBOUNDED: Final = 1 << 20
ONE_ROW: Final = "triton, flashinfer or trtllm_mha with --max-running-requests 1"
"""The table's name of backends with fewer rows than a splice needs."""


def check_support(ctx: BuildContext) -> None:
    """Refuse what would be served wrongly.

    Raises:
        UnsupportedError: naming the flag or the property of the model, and what to change.
    """
    for refusal in refusals(ctx):
        raise UnsupportedError(refusal)


def prefix_only(ctx: BuildContext) -> str:
    """Why a server gets SGLang's own cache, in one line without a full stop; empty where it splices."""
    return "; ".join(f"{entry.what}: {entry.reason}" for entry in present(ctx, Level.PREFIX_ONLY))


def refusals(ctx: BuildContext) -> Iterator[str]:
    """A line for each thing that is refused, naming the flag or the property of the model, and what to change.

    A server that is prefix only is refused nothing: what it cannot serve is SGLang's to say.
    """
    if prefix_only(ctx):
        return
    for entry in present(ctx, Level.REFUSED):
        value = _value(entry.path, ctx) if entry.what.startswith("--") else True
        yield entry.refused.line(entry.what if isinstance(value, bool) else f"{entry.what} {value}")
    if disaggregation_mode(ctx) == "decode":
        return
    refusal = refused_backend(ctx.tp_worker.model_runner)
    if refusal:
        yield refusal


def check_features(ctx: BuildContext) -> list[str]:
    """`check_contract` for the features that this server has."""
    mode = disaggregation_mode(ctx)
    found = (entry for entry in present(ctx, Level.TESTED, Level.ADMITTED) if entry.contract and mode in entry.modes)
    needed = {entry.contract: entry.what for entry in found}
    return [path for name, what in needed.items() for path in check_contract(FEATURES[name], without=what)]


def warn_of_changes(ctx: BuildContext, changed_bodies: Sequence[str]) -> None:
    """Log on one rank which functions of SGLang differ from the tested version, those of the backend included."""
    if ctx.tp_rank != 0:
        return
    changed = [*changed_bodies, *changed_attention(prefill_backend(ctx.tp_worker.model_runner))]
    if changed:
        logger.warning("sglang_pic: %s", describe_changes(changed))


def present(ctx: BuildContext, *levels: Level) -> Iterator[Support]:
    """The entries of some levels that a server has by a flag or by its model: those with a `path`."""
    mode = disaggregation_mode(ctx)
    for entry in SUPPORT:
        if entry.level in levels and (entry.level is not Level.REFUSED or mode in entry.modes):
            values = [_value(path, ctx) for path in entry.path.split()]
            beside = not entry.beside or any(_value(path, ctx) for path in entry.beside.split())
            spared = entry.unless and _value(entry.unless, ctx)
            if beside and not spared and any(_has(entry, value) for value in values):
                yield entry


def _has(entry: Support, value: object) -> bool:
    """Whether `entry` applies to a server with `value` at one of its paths."""
    if entry.values:
        return value in entry.values
    if isinstance(entry.served, list):
        return (value or "") not in entry.served
    return (bool(value) if isinstance(entry.served, bool) else value) != entry.served


def always_computed(ctx: BuildContext, fallback: Fallback) -> str:
    """Why a server computes every request that could fall back so, in sentences; empty where it does not."""
    found = (entry.reason for entry in present(ctx, Level.FALLS_BACK) if entry.fallback == fallback.value)
    return " ".join(reason for reason in found if reason != fallback.description)


def default_mode(ctx: BuildContext) -> Mode | None:
    """The default mode of requests if the server's flags decide it, which one rank logs; None if the operator does."""
    reason = always_computed(ctx, Fallback.OFF)
    if reason and ctx.tp_rank == 0:
        logger.info("sglang_pic: %s", reason)
    return Mode.OFF if reason else None


def disaggregation_mode(ctx: BuildContext) -> str:
    """`null`, `prefill` or `decode`."""
    return str(_value("server_args.disaggregation_mode", ctx))


def find(area: Area, what: str) -> Support | None:
    """The entry of the matrix for `what`; None where the matrix does not name it."""
    return next((entry for entry in SUPPORT if entry.area is area and entry.what == what), None)


def prefill_backend(runner: ModelRunner) -> str:
    """SGLang's name of the prefill attention backend of `runner`; `dsa` for its alias `nsa`."""
    name = str(runner.prefill_attention_backend_str)
    return "dsa" if name == "nsa" else name


def refused_backend(runner: ModelRunner) -> str:
    """The line that refuses the prefill attention backend of a model and says what helps; empty where it is served."""
    backend, rows = prefill_backend(runner), int(runner.req_to_token_pool.size)
    known = {entry.what: entry for entry in SUPPORT if entry.area is Area.ATTENTION}
    served = [what for what, entry in known.items() if entry.level is not Level.REFUSED]
    if backend in _WITH_SEQUENCE_TABLES and rows < 2:
        what = f"--max-running-requests {rows} on the prefill attention backend {backend!r}"
        return known[ONE_ROW].refused.line(what)
    if backend in served:
        return ""
    entry = known.get(backend, known["any other"])
    refused = entry.refused
    if entry.what == "any other":
        refused = refused._replace(change=f"choose one of {', '.join(served)} with --attention-backend")
    return refused.line(f"the prefill attention backend {backend!r}")


def _value(path: str, ctx: BuildContext) -> object:
    """What a server has at a path of the table."""
    from sglang.srt.arg_groups.model_override_base import resolved_view

    owner, _, name = path.rpartition(".")
    if owner == "environ":
        from sglang.srt.environ import envs

        return getattr(envs, name).get()
    if owner == "platform":
        from sglang.srt.runtime_context import get_platform

        return getattr(get_platform(), name)
    if owner == "server_args":
        # NOTE: SGLang leaves arguments as they were given, and keeps what it made of them apart: `--dp-size 2
        # --enable-dp-attention` and `--dwdp-size 2` are both `attn_dp_size=2`.
        return getattr(resolved_view(ctx.server_args), name)
    return attrgetter(path)(ctx)


def max_sequences(runner: ModelRunner) -> int:
    """The most virtual sequences that one batch of `runner` may have: 2 or more unless it is refused."""
    has_tables = prefill_backend(runner) in _WITH_SEQUENCE_TABLES
    return int(runner.req_to_token_pool.size) if has_tables else _UNBOUNDED


def max_keys(runner: ModelRunner) -> int:
    """The most keys of all sequences of one gap batch of `runner`, each counted as long as the longest."""
    if prefill_backend(runner) != "dsa":
        return _MOST_IN_TABLE
    return min(_MOST_SCORED, _MOST_GATHERED_BYTES // (132 + _gathered_bytes(runner)))


def _gathered_bytes(runner: ModelRunner) -> int:
    """Bytes that `dsa` gathers of a layer's row for its prefill kernel, as FP8 or as bfloat16; 0 if it reads the pool.

    With `flashmla_auto` SGLang chooses by batch.
    """
    pool, served = runner.token_to_kv_pool, runner.attn_backend
    # A hybrid backend has one for prefill; a draft may have another one than its runner names.
    backend = getattr(served, "prefill_backend", served)
    impl, row = getattr(backend, "dsa_prefill_impl", None), int(pool.kv_lora_rank + pool.qk_rope_head_dim)
    if impl == "flashmla_sparse_q8":
        return row
    dequantises = impl in _DEQUANTISING or getattr(backend, "enable_auto_select_prefill_impl", False)
    return 2 * row if dequantises and pool.dsa_kv_cache_store_fp8 else 0
