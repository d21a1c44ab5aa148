"""What the plugin was tested with, what it admits untested, and what it refuses when the server starts.

One table, because start-up checks it and the reference page prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from operator import attrgetter
from typing import Final, NamedTuple

from sglang_pic.adapter.contract import BUILT_FOR
from sglang_pic.adapter.seams import BuildContext, ModelRunner
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime.rope import KNOWN_EMBEDDINGS, REFUSED_EMBEDDINGS
from sglang_pic.runtime.views import KNOWN_POOLS, PLAIN_LAYOUT, REFUSED_POOLS

__all__ = ["SUPPORT", "Area", "Level", "Support", "check_support", "max_sequences"]


class Area(Enum):
    """What an entry of the matrix is about."""

    SGLANG = "SGLang"
    MODEL = "models"
    EMBEDDING = "rotary embeddings"
    ATTENTION = "prefill attention backends"
    POOL = "KV pools"
    TOPOLOGY = "topology"
    FEATURE = "features"


class Level(Enum):
    """How far something is supported."""

    TESTED = "tested with every commit, on CPUs"
    ADMITTED = "admitted by its sources, not run yet"
    REFUSED = "refused when the server starts"


class Support(NamedTuple):
    """One entry of the matrix."""

    area: Area
    level: Level
    what: str
    reason: str
    """One clause: why this is admitted or refused, or what was tested."""
    path: str = ""
    """Where SGLang's `TreeCacheBuildContext` has the value that `check_support` looks at; empty where the refusal is
    elsewhere."""
    plain: object = False
    """The only value at `path` that is served."""
    change: str = ""
    """What to do instead."""

    def refuses(self, value: object) -> bool:
        """Whether `value` at `path` is refused."""
        return bool(value) is not self.plain if isinstance(self.plain, bool) else value != self.plain


def _flag(
    area: Area, name: str, reason: str, *, plain: object = False, change: str = "remove it", of: str = "server_args."
) -> Support:
    return Support(area, Level.REFUSED, "--" + name.replace("_", "-"), reason, of + name, plain, change)


def _model(path: str, what: str, reason: str, *, plain: object = False) -> Support:
    change = "serve this model without --radix-cache-backend pic"
    return Support(Area.MODEL, Level.REFUSED, f"a model {what}", reason, path, plain, change)


def _refused(area: Area, reasons: Mapping[str, str], otherwise: str) -> list[Support]:
    """What `runtime` refuses by name, and everything that it does not know."""
    known = [Support(area, Level.REFUSED, name, reason) for name, reason in reasons.items()]
    return [*known, Support(area, Level.REFUSED, "any other", otherwise)]


# Attention backends whose layers write rows into the pool before attention reads them through the page table, so that
# the virtual sequences of one request see each other's rows.
_BY_SOURCE: Final = "its source writes rows before it reads any"
_ON_SERVERS: Final = ("DeepseekScalingRotaryEmbedding", "RotaryEmbedding")

SUPPORT: Final = (
    Support(Area.SGLANG, Level.TESTED, BUILT_FOR, "every test runs on it"),
    Support(Area.SGLANG, Level.ADMITTED, "a version with the same symbols", "start-up looks at each that is used"),
    Support(Area.SGLANG, Level.REFUSED, "a version with other symbols", "the error names the first that differs"),
    Support(Area.MODEL, Level.TESTED, "SmolLM2-135M-Instruct", "GQA"),
    Support(Area.MODEL, Level.TESTED, "SmolLM2-135M-Instruct converted to MLA", "see `sglang-pic model`"),
    Support(Area.MODEL, Level.TESTED, "two tiny models with random weights", "GQA, and MLA with experts"),
    Support(Area.MODEL, Level.ADMITTED, "every other model with MHA, GQA or MLA", "start-up tests splices on it"),
    _model("is_hybrid_swa", "with sliding-window layers", "they drop rows that a splice would copy"),
    _model("is_hybrid_ssm", "with state-space layers", "their state is not made of rows"),
    _model("is_dsa", "with a sparse-attention indexer", "the indexer keeps rotated keys of its own"),
    _model("model_config.is_generation", "that does not generate", "its result needs every token", plain=True),
    _flag(Area.MODEL, "dllm_algorithm", "the rows of a diffusion model depend on later tokens", plain=None),
    *(
        Support(Area.EMBEDDING, Level.TESTED if name in _ON_SERVERS else Level.ADMITTED, name, "compared with SGLang's")
        for name in KNOWN_EMBEDDINGS
    ),
    *_refused(Area.EMBEDDING, REFUSED_EMBEDDINGS, "its geometry is not known"),
    Support(Area.ATTENTION, Level.TESTED, "pic_cpu", "every test server runs on it"),
    Support(Area.ATTENTION, Level.ADMITTED, "torch_native", "its attention is compared with that of pic_cpu"),
    Support(Area.ATTENTION, Level.ADMITTED, "triton", _BY_SOURCE),
    Support(Area.ATTENTION, Level.ADMITTED, "fa3", _BY_SOURCE),
    Support(Area.ATTENTION, Level.ADMITTED, "flashinfer", _BY_SOURCE),
    *_refused(Area.ATTENTION, {}, "the order in which it writes and reads rows is not known"),
    *(Support(Area.POOL, Level.TESTED, name, f"holds {kind.name}") for name, kind in KNOWN_POOLS.items()),
    Support(Area.POOL, Level.TESTED, "rows of float32 or bfloat16, pages of 1 or 16 tokens", "on servers"),
    Support(Area.POOL, Level.ADMITTED, "rows of float16 or float8_e4m3, other page sizes", "kernels are tested"),
    Support(Area.POOL, Level.REFUSED, "rows of any other dtype", "no kernel rotates them"),
    *(Support(Area.POOL, Level.REFUSED, f"{name} other than {plain[0]!r}", why) for name, plain, why in PLAIN_LAYOUT),
    *_refused(Area.POOL, REFUSED_POOLS, "its layout is not known"),
    Support(Area.TOPOLOGY, Level.TESTED, "one rank, tensor parallelism of 2", "on servers"),
    Support(Area.TOPOLOGY, Level.ADMITTED, "tensor parallelism of more ranks", "ranks agree on what they read"),
    _flag(Area.TOPOLOGY, "pp_size", "pipeline stages exchange no plans", plain=1, change="use --tp-size instead"),
    _flag(Area.TOPOLOGY, "dcp_size", "each rank holds a part of every sequence's rows", plain=1),
    _flag(Area.TOPOLOGY, "attn_cp_size", "each rank computes a part of every sequence", plain=1),
    _flag(Area.TOPOLOGY, "enable_dp_attention", "ranks of one batch serve different requests"),
    _flag(Area.TOPOLOGY, "disaggregation_mode", "rows are exchanged with another server", plain="null"),
    _flag(Area.TOPOLOGY, "enable_two_batch_overlap", "a batch with splices cannot be cut in two"),
    _flag(Area.TOPOLOGY, "enable_pdmux", "prefill does not use the forward pass that splices"),
    _flag(Area.FEATURE, "disable_radix_cache", "rows are found in the radix tree", of=""),
    _flag(Area.FEATURE, "enable_hierarchical_cache", "rows in host memory cannot be spliced", of=""),
    _flag(Area.FEATURE, "enable_lmcache", "LMCache brings a radix tree of its own"),
    _flag(Area.FEATURE, "enable_unified_cache_external_linker", "rows outside the device's pool cannot be spliced"),
    _flag(Area.FEATURE, "enable_unified_memory", "slots are translated on every access"),
    _flag(Area.FEATURE, "speculative_algorithm", "the rows of the draft model are not spliced", plain=None),
    _flag(Area.FEATURE, "enable_return_routed_experts", "a spliced token passes no experts"),
    _flag(Area.FEATURE, "enable_deterministic_inference", "answers depend on what is cached"),
    _flag(Area.FEATURE, "rl_on_policy_target", "answers depend on what is cached", plain=None),
)
"""Everything that is tested, admitted or refused."""


def check_support(ctx: BuildContext) -> None:
    """Refuse what would be served wrongly.

    Raises:
        UnsupportedError: naming the flag or the property of the model, and what to change.
    """
    for entry in SUPPORT:
        value = attrgetter(entry.path)(ctx) if entry.path else entry.plain
        if entry.refuses(value):
            shown = entry.what if isinstance(value, bool) else f"{entry.what} {value}"
            raise UnsupportedError(
                f"--radix-cache-backend pic does not work with {shown}: {entry.reason}; {entry.change}."
            )
    backend = ctx.tp_worker.model_runner.prefill_attention_backend_str
    served = [entry.what for entry in SUPPORT if entry.area is Area.ATTENTION and entry.level is not Level.REFUSED]
    if backend not in served:
        raise UnsupportedError(
            f"--radix-cache-backend pic does not work with the prefill attention backend {backend!r}: choose one of "
            f"{', '.join(served)} with --attention-backend."
        )


_WITH_SEQUENCE_TABLES: Final = ("triton", "flashinfer")
"""Backends with tables for as many sequences as the request pool has rows."""
_UNBOUNDED: Final = 1 << 20


def max_sequences(runner: ModelRunner) -> int:
    """The most virtual sequences that one batch of `runner` may have.

    Raises:
        UnsupportedError: too few for a single splice.
    """
    backend, rows = runner.prefill_attention_backend_str, int(runner.req_to_token_pool.size)
    if backend not in _WITH_SEQUENCE_TABLES:
        return _UNBOUNDED
    if rows < 2:
        raise UnsupportedError(
            f"--radix-cache-backend pic does not work with --max-running-requests {rows} on the prefill attention "
            f"backend {backend!r}, which computes at most as many gaps in one pass: allow 2 or more."
        )
    return rows
