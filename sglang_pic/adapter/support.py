"""What the plugin was tested with, what it admits untested, and what it refuses when the server starts.

The tables are data, because the reference page prints them and start-up checks them. Rotary embeddings and KV pools are
refused where they are read; their tables stand in `runtime.rope` and `runtime.views`, and `support_matrix` joins them.
"""

from __future__ import annotations

from enum import Enum
from operator import attrgetter
from typing import Final, NamedTuple

from sglang_pic.adapter.contract import BUILT_FOR
from sglang_pic.adapter.seams import BuildContext, ModelRunner
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime.rope import KNOWN_EMBEDDINGS, REFUSED_EMBEDDINGS
from sglang_pic.runtime.views import KNOWN_POOLS, PLAIN_LAYOUT, REFUSED_POOLS

__all__ = ["REFUSALS", "Area", "Level", "Refusal", "Support", "check_support", "max_sequences", "support_matrix"]


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
    """One clause: why it is admitted or refused, or what was tested."""


class Refusal(NamedTuple):
    """What is refused unless SGLang's `TreeCacheBuildContext` has the plain value at `path`."""

    what: str
    path: str
    plain: object
    reason: str
    change: str

    def applies(self, value: object) -> bool:
        """Whether `value` at `path` is refused."""
        return bool(value) is not self.plain if isinstance(self.plain, bool) else value != self.plain

    def line(self, value: object) -> str:
        """The error: a flag with its value, as on a command line, anything else by its name alone."""
        shown = self.what if isinstance(value, bool) else f"{self.what} {value}"
        return f"--radix-cache-backend pic does not work with {shown}: {self.reason}; {self.change}."


def _flag(
    name: str, reason: str, *, plain: object = False, change: str = "remove it", parent: str = "server_args."
) -> Refusal:
    return Refusal("--" + name.replace("_", "-"), parent + name, plain, reason, change)


def _model(path: str, what: str, reason: str, *, plain: object = False) -> Refusal:
    return Refusal(f"a model {what}", path, plain, reason, "serve this model without --radix-cache-backend pic")


REFUSALS: Final = {
    Area.MODEL: (
        _model("is_hybrid_swa", "with sliding-window layers", "they drop rows that a splice would copy"),
        _model("is_hybrid_ssm", "with state-space layers", "their state is not made of rows"),
        _model("is_dsa", "with a sparse-attention indexer", "the indexer keeps rotated keys of its own"),
        _model("model_config.is_generation", "that does not generate", "its result needs every token", plain=True),
        _flag("dllm_algorithm", "the rows of a diffusion model depend on later tokens", plain=None),
    ),
    Area.TOPOLOGY: (
        _flag("pp_size", "pipeline stages do not exchange plans", plain=1, change="use --tp-size instead"),
        _flag("dcp_size", "each rank holds a part of every sequence's rows", plain=1),
        _flag("attn_cp_size", "each rank computes a part of every sequence", plain=1),
        _flag("enable_dp_attention", "ranks of one batch serve different requests"),
        _flag("disaggregation_mode", "rows are exchanged with another server", plain="null"),
        _flag("enable_two_batch_overlap", "a batch with splices cannot be cut in two"),
        _flag("enable_pdmux", "prefill does not use the forward pass that splices"),
    ),
    Area.FEATURE: (
        _flag("disable_radix_cache", "rows are found in the radix tree", parent=""),
        _flag("enable_hierarchical_cache", "rows in host memory cannot be spliced", parent=""),
        _flag("enable_lmcache", "LMCache brings a radix tree of its own"),
        _flag("enable_unified_cache_external_linker", "rows outside the device's pool cannot be spliced"),
        _flag("enable_unified_memory", "slots are translated on every access"),
        _flag("speculative_algorithm", "the rows of the draft model are not spliced", plain=None),
        _flag("enable_return_routed_experts", "a spliced token passes no experts"),
        _flag("enable_deterministic_inference", "answers depend on what is cached"),
        _flag("rl_on_policy_target", "answers depend on what is cached", plain=None),
    ),
}

# Backends whose layers write rows into the pool before attention reads them through the page table, so that the virtual
# sequences of one request see each other's rows.
_BY_SOURCE: Final = (Level.ADMITTED, "its source writes rows before it reads any")
_BACKENDS: Final = {
    "pic_cpu": (Level.TESTED, "every test server runs on it"),
    "torch_native": (Level.ADMITTED, "its attention is compared with that of pic_cpu"),
    "triton": _BY_SOURCE,
    "fa3": _BY_SOURCE,
    "flashinfer": _BY_SOURCE,
}
_WITH_SEQUENCE_TABLES: Final = ("triton", "flashinfer")
"""Backends with tables for as many sequences as the request pool has rows."""
_UNBOUNDED: Final = 1 << 20

_SERVED: Final = (
    Support(Area.SGLANG, Level.TESTED, BUILT_FOR, "every test runs on it"),
    Support(Area.SGLANG, Level.ADMITTED, "a version with the same symbols", "start-up looks at each that is used"),
    Support(Area.SGLANG, Level.REFUSED, "a version with other symbols", "the error names the first that differs"),
    Support(Area.MODEL, Level.TESTED, "SmolLM2-135M-Instruct", "GQA"),
    Support(Area.MODEL, Level.TESTED, "SmolLM2-135M-Instruct converted to MLA", "see `sglang-pic model`"),
    Support(Area.MODEL, Level.TESTED, "two tiny models with random weights", "GQA, and MLA with experts"),
    Support(Area.MODEL, Level.ADMITTED, "every other model with MHA, GQA or MLA", "start-up tests splices on it"),
    Support(Area.POOL, Level.TESTED, "rows of float32 or bfloat16, pages of 1 or 16 tokens", "on servers"),
    Support(Area.POOL, Level.ADMITTED, "rows of float16 or float8_e4m3, other page sizes", "kernels are tested"),
    Support(Area.POOL, Level.REFUSED, "rows of any other dtype", "no kernel rotates them"),
    Support(Area.TOPOLOGY, Level.TESTED, "one rank, tensor parallelism of 2", "on servers"),
    Support(Area.TOPOLOGY, Level.ADMITTED, "tensor parallelism of more ranks", "ranks agree on what they read"),
)
_EMBEDDINGS_ON_SERVERS: Final = ("DeepseekScalingRotaryEmbedding", "RotaryEmbedding")


def support_matrix() -> list[Support]:
    """Everything that is tested, admitted or refused."""
    entries = list(_SERVED)
    for name in KNOWN_EMBEDDINGS:
        level = Level.TESTED if name in _EMBEDDINGS_ON_SERVERS else Level.ADMITTED
        entries.append(Support(Area.EMBEDDING, level, name, "compared with SGLang's own module"))
    entries += [Support(Area.ATTENTION, level, name, reason) for name, (level, reason) in _BACKENDS.items()]
    entries += [Support(Area.POOL, Level.TESTED, name, f"holds {kind.name}") for name, kind in KNOWN_POOLS.items()]
    refused = [(area, refusal.what, refusal.reason) for area, found in REFUSALS.items() for refusal in found]
    refused += [(Area.EMBEDDING, name, reason) for name, reason in REFUSED_EMBEDDINGS.items()]
    refused += [(Area.EMBEDDING, "any other class", "its geometry is not known")]
    refused += [(Area.ATTENTION, "any other backend", "the order in which it writes and reads rows is not known")]
    refused += [(Area.POOL, name, reason) for name, reason in REFUSED_POOLS.items()]
    refused += [(Area.POOL, f"{name} other than {plain[0]!r}", reason) for name, plain, reason in PLAIN_LAYOUT]
    refused += [(Area.POOL, "any other class", "its layout is not known")]
    return entries + [Support(area, Level.REFUSED, what, reason) for area, what, reason in refused]


def check_support(ctx: BuildContext) -> None:
    """Refuse what would be served wrongly.

    Raises:
        UnsupportedError: naming the flag or the property of the model, and what to change.
    """
    for refusal in (refusal for found in REFUSALS.values() for refusal in found):
        value = attrgetter(refusal.path)(ctx)
        if refusal.applies(value):
            raise UnsupportedError(refusal.line(value))
    backend = ctx.tp_worker.model_runner.prefill_attention_backend_str
    if backend not in _BACKENDS:
        raise UnsupportedError(
            f"--radix-cache-backend pic does not work with the prefill attention backend {backend!r}: choose one of "
            f"{', '.join(_BACKENDS)} with --attention-backend."
        )


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
