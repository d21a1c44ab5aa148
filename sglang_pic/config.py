"""The one configuration of the plugin, `PicConfig`.

It comes from one JSON text or file, named by the environment variable `SGLANG_PIC_CONFIG`, and is checked whole: an
unknown key or a value out of range stops the server. It knows neither torch nor SGLang.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

import msgspec

from sglang_pic.core import CoreConfig, CostModel
from sglang_pic.errors import ConfigError

__all__ = ["CONFIG_VARIABLE", "PicConfig", "TestingConfig", "load_config", "read_config"]

CONFIG_VARIABLE = "SGLANG_PIC_CONFIG"


class TestingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Switches that make sense in tests only; each one is named in the log when it is on."""

    __test__ = False  # the name begins like a test class; pytest must not collect it

    ignore_prefix: bool = False
    """Serve nothing from the exact prefix, so that a repeated prompt is spliced from its own chunks at shift 0."""

    check_invariants: bool = False
    """Check the whole chunk index after every publication (slow)."""

    request_options: bool = False
    """Take `custom_params.pic.testing`, with which a request names its donors' namespace, leaves keys unrotated, and
    so on; a server without this answers such a request with HTTP 400."""

    record_dir: str | None = None
    """Folder for what requests with `testing.record` computed: logits, spliced spans, keys."""

    @property
    def names_on(self) -> list[str]:
        """The switches that are on."""
        return [name for name in self.__struct_fields__ if getattr(self, name)]


class PicConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator can set; the defaults are the measured ones of the design notes."""

    core: CoreConfig = msgspec.field(default_factory=CoreConfig)
    """Chunking, index and planning."""

    max_gaps: int = 32
    """Most gaps that one request may have; each one is a virtual sequence of the gap prefill."""

    max_runs: int = 64
    """Most runs of one request; each one is a path that is matched in the radix tree again. Runs may adjoin: a
    conversation behind a clock is one run a turn, and no gap between them."""

    cost_gate: Literal["auto", "off"] | CostModel = "auto"
    """Weighs each run by what it saves: `auto` measures this machine and model at start-up, `off` takes every run of
    `core.min_run_tokens` and more, a cost model (microseconds) is taken as it is."""

    self_test: Literal["warn", "off", "refuse"] = "warn"
    """Splice built-in prompts before the first request and compare with computing them: `warn` logs a model that does
    not take it, `refuse` stops the server, `off` does not look."""

    # SmolLM2 measures KL 0.03 and keys 0.18, with keys left unrotated 1.3 and 1.0, with a base a tenth off 0.8 and 0.7
    # (bf16; design notes). Random weights take no splice from another context: 1.6 to 2.7 and 0.63 to 0.65.
    self_test_kl_limit: float = 0.25
    """Nats: mean KL(full || spliced) of the first token, over built-in prompts with blocks from another context."""

    self_test_key_limit: float = 0.4
    """Relative L2 between the keys of those blocks, spliced and as a full prefill computes them, mean over layers."""

    audit_rate: float = 0.01
    """The share of spliced requests that are computed again in full, when nobody waits; 0 audits none."""

    audit_kl_limit: float = 0.25
    """Nats: the mean KL(full || spliced) of a namespace's window above which it is switched off."""

    audit_kl_cap: float = 2.0
    """Nats: what one audited request counts at most in that mean."""

    audit_window: int = 32
    """Audited requests of a namespace that the mean is over, the last ones."""

    audit_min: int = 16
    """Audited requests of a namespace before it can be switched off."""

    testing: TestingConfig = msgspec.field(default_factory=TestingConfig)

    def __post_init__(self) -> None:
        _check_audit(self)
        if not 1 <= self.max_gaps <= 4096:
            raise ConfigError(f"max_gaps={self.max_gaps!r}: must be from 1 to 4096; 32 is the default.")
        if not 1 <= self.max_runs <= 4096:
            raise ConfigError(f"max_runs={self.max_runs!r}: must be from 1 to 4096; 64 is the default.")
        for name in ("self_test_kl_limit", "self_test_key_limit"):
            limit = getattr(self, name)
            if not 0 < limit < math.inf:
                default = PicConfig.__struct_defaults__[PicConfig.__struct_fields__.index(name)]
                raise ConfigError(f"{name}={limit!r}: must be a positive number; {default} is the default.")


def _check_audit(config: PicConfig) -> None:
    if not 0 <= config.audit_rate <= 1:
        raise ConfigError(f"audit_rate={config.audit_rate!r}: must be from 0 to 1; 0.01 is the default, 0 audits none.")
    if not 0 < config.audit_kl_limit < config.audit_kl_cap < math.inf:
        raise ConfigError(
            f"audit_kl_limit={config.audit_kl_limit!r}, audit_kl_cap={config.audit_kl_cap!r}: the limit must be above "
            "0 and below the cap, which bounds the mean; 0.25 and 2.0 are the defaults."
        )
    if not 1 <= config.audit_min <= config.audit_window <= 10_000:
        raise ConfigError(
            f"audit_min={config.audit_min!r}, audit_window={config.audit_window!r}: must be from 1 to 10000, and the "
            "minimum no more than the window; 16 and 32 are the defaults."
        )


def read_config(text: str) -> PicConfig:
    """Read a configuration from a JSON text, or from the file it names.

    Raises:
        ConfigError: the text is neither JSON nor a readable file, or a value is not allowed.
    """
    source = "the JSON text"
    if not text.lstrip().startswith("{"):
        source = text
        try:
            text = Path(text).read_text(encoding="utf8")
        except OSError as error:
            raise ConfigError(
                f"{CONFIG_VARIABLE}={source!r}: neither a JSON object nor a readable file ({error.strerror}); "
                f'give {{"core": {{"seam_tokens": 1}}}} or the path of such a file.'
            ) from error
    try:
        return msgspec.json.decode(text, type=PicConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error} (in {source}).") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {source} is not valid JSON: {error}.") from error


def load_config() -> PicConfig:
    """The configuration of this process: `SGLANG_PIC_CONFIG`, or the defaults where it is not set."""
    text = os.environ.get(CONFIG_VARIABLE, "").strip()
    return read_config(text) if text else PicConfig()
