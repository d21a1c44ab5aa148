"""summary.json: the result of a comparison, as tools and the reports read it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from pic_replay.records import Latency

SCHEMA_VERSION = 1


class ArmKind(Enum):
    """The server and the requests of an arm."""

    STOCK = "stock"
    STOCK_AGAIN = "stock-again"
    STOCK_COLD = "stock-cold"
    PIC = "pic"
    PIC_OFF = "pic-off"

    @property
    def is_stock(self) -> bool:
        """Whether the server runs without the plugin's cache."""
        return self in {ArmKind.STOCK, ArmKind.STOCK_AGAIN, ArmKind.STOCK_COLD}


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm's totals over its successful requests; `requests` counts every request that was sent.

    `prompt_tokens` = `prefix_hit_tokens` + `chunk_hit_tokens` + `computed_tokens`.
    """

    kind: ArmKind
    requests: int
    failed: int
    skipped: int
    warmup_requests: int
    prompt_tokens: int
    prefix_hit_tokens: int
    chunk_hit_tokens: int
    computed_tokens: int
    output_tokens: int
    wall_s: float
    ready_s: float
    ttft_s: Latency
    e2e_s: Latency
    schedule_delay_s: Latency
    achieved_requests_per_s: float
    server_args: list[str]
    tools_flattened: bool = False
    skipped_reasons: dict[str, int] = {}
    errors: dict[str, int] = {}
    pic_counters: dict[str, float] = {}


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compared arm against the baseline, over calls that both answered."""

    requests: int
    baseline_ttft_p50_s: float | None
    ttft_p50_s: float | None
    ttft_speedup_p50: float | None
    baseline_computed_tokens: int
    computed_tokens: int
    computed_tokens_ratio: float | None
    first_token_agreement: float | None
    output_agreement: float | None


class Bucket(Figures, frozen=True, kw_only=True):
    """Of the requests whose chunk-hit tokens in the compared arm lie in `[low, high)`; `high` None is unbounded."""

    low: int
    high: int | None


class Kl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KL of the first token's top-k distribution, baseline against arm, in nats, over `requests` pairs."""

    requests: int
    p50: float
    p99: float
    max: float


class Paired(Figures, frozen=True, kw_only=True):
    """Two arms on the same requests; only pairs in which both succeeded count."""

    baseline: str
    arm: str
    prompts_differ: int
    first_token_kl: Kl | None
    by_chunk_hit_tokens: list[Bucket]
    at_least_chunk_hit_tokens: list[Bucket]
    from_second_call: Figures
    """Without the first call of every session, which is text that nobody has sent before."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which trace was replayed and how much of it."""

    name: str
    path: str | None = None
    sha256: str | None = None
    sessions: int
    calls: int


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's folder or hub name, for a folder with the facts of its config.json."""

    path: str
    name: str
    architecture: str | None = None
    dtype: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    context_len: int | None = None
    weights_bytes: int | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The part of summary.json that is known before arms are compared; a report reads only this and compares anew."""

    schema_version: int = SCHEMA_VERSION
    trace: Trace
    model: Model
    started_at: str
    finished_at: str
    arms: dict[str, ArmSummary]


class Summary(Measured, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """summary.json of a comparison."""

    paired: Paired | None = None
    """Of `comparisons` that of the first patched arm with stock, if that has a prefix cache."""
    comparisons: list[Paired] = []
    """Every other arm against the first stock arm with a prefix cache, or the first arm where there is none."""
    noise_floor: str | None = None

    @property
    def floor(self) -> Paired | None:
        """Stock against a second stock run: the differences without any change."""
        return next((pair for pair in self.comparisons if pair.arm == self.noise_floor), None)


class ScenesSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """summary.json of a comparison on several traces: the summary of every scene."""

    schema_version: int = SCHEMA_VERSION
    scenes: dict[str, Summary]


_FACTS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "context_len": "max_position_embeddings",
}
"""Of a model, by their names in its config.json."""


def model_facts(path: str) -> Model:
    """The facts of the model's folder; only the name for a hub model or a folder without config.json."""
    folder = Path(path)
    name = folder.resolve().name if folder.exists() else path
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
        facts = {ours: config.get(theirs) for ours, theirs in _FACTS.items()}
        facts["architecture"] = next(iter(config.get("architectures") or ()), None)
        facts["dtype"] = config.get("dtype") or config.get("torch_dtype")
        facts["weights_bytes"] = sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
        return msgspec.convert({"path": path, "name": name, **facts}, Model)
    except (OSError, msgspec.DecodeError):
        return Model(path=path, name=name)
