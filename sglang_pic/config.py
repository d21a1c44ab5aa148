"""The configuration of the plugin, `PicConfig`: one JSON text or file in the environment variable `SGLANG_PIC_CONFIG`.

An unknown key or a value out of range stops the server.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sglang_pic.core import CoreConfig, CostModel
from sglang_pic.core.settings import Integers, Numbers, check, setting
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
    """Everything an operator can set."""

    core: CoreConfig = msgspec.field(default_factory=CoreConfig)
    max_gaps: Annotated[
        int,
        setting(
            Integers(1, 4096),
            "Most gaps of one request, each one a virtual sequence of the gap prefill; a batch never has more than the "
            "attention backend has room for.",
        ),
    ] = 32
    # A conversation behind a clock is one run a turn, and no gap between them.
    max_runs: Annotated[
        int,
        setting(
            Integers(1, 4096),
            "Most runs of one request, each one a path that is matched in the radix tree again; adjoining runs leave "
            "no gap between them.",
        ),
    ] = 64
    cost_gate: Annotated[
        Literal["auto", "off"] | CostModel,
        setting(
            None,
            'What a run must save: `"auto"` measures this machine and model at start-up, `"off"` takes every run of '
            "`core.min_run_tokens` and more, and a cost model gives the costs in microseconds: "
            '`{"computed_token_us": .., "spliced_token_us": .., "gap_us": ..}`.',
        ),
    ] = "auto"
    self_test: Annotated[
        Literal["warn", "off", "refuse"],
        setting(
            None,
            'What happens at start-up if the model does not take splices of built-in prompts: `"warn"` logs it, '
            '`"refuse"` stops the server, `"off"` skips the test.',
        ),
    ] = "warn"
    # SmolLM2 measures KL 0.03 and keys 0.18, with keys left unrotated 1.3 and 1.0, with a base a tenth off 0.8 and 0.7
    # (bf16). Random weights take no splice from another context: 1.6 to 2.7 and 0.63 to 0.65.
    self_test_kl_limit: Annotated[
        float,
        setting(
            Numbers(0),
            "Largest mean KL(full || spliced) of the self-test's first tokens, over prompts with blocks from another "
            "context, in nats.",
        ),
    ] = 0.25
    self_test_key_limit: Annotated[
        float,
        setting(
            Numbers(0),
            "Largest relative L2 in the self-test between the keys of those blocks, spliced and computed in full, mean "
            "over layers.",
        ),
    ] = 0.4
    audit_rate: Annotated[
        float,
        setting(
            Numbers(0, 1),
            "Share of spliced requests that are computed again in full while no request waits; 0 audits none.",
        ),
    ] = 0.01
    audit_kl_limit: Annotated[
        float,
        setting(
            Numbers(0),
            "Mean KL(full || spliced) of a namespace's audited requests above which splicing is switched off there, in "
            "nats.",
        ),
    ] = 0.25
    audit_kl_cap: Annotated[
        float, setting(Numbers(0), "What one audited request counts at most in that mean, in nats.")
    ] = 2.0
    audit_window: Annotated[
        int, setting(Integers(1, 10_000), "Number of a namespace's last audited requests in that mean.")
    ] = 32
    audit_min: Annotated[
        int, setting(Integers(1, 10_000), "Audited requests of a namespace before it can be switched off.")
    ] = 16
    testing: TestingConfig = msgspec.field(default_factory=TestingConfig)

    def __post_init__(self) -> None:
        check(self)
        if self.audit_kl_limit >= self.audit_kl_cap:
            raise ConfigError(
                f"audit_kl_limit={self.audit_kl_limit!r}, audit_kl_cap={self.audit_kl_cap!r}: the limit must be below "
                "the cap, which bounds the mean; 0.25 and 2.0 are the defaults."
            )
        if self.audit_min > self.audit_window:
            raise ConfigError(
                f"audit_min={self.audit_min!r}, audit_window={self.audit_window!r}: the minimum must be no more than "
                "the window; 16 and 32 are the defaults."
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
