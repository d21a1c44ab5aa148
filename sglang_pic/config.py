"""The configuration of the plugin, `PicConfig`: one JSON text or file in the environment variable `SGLANG_PIC_CONFIG`.

An unknown key or a bad value stops the server.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sglang_pic.core import CoreConfig, CostModel, with_preset
from sglang_pic.errors import ConfigError, did_you_mean
from sglang_pic.nonces import NONCES
from sglang_pic.settings import Range, check, settings_of

Share = Annotated[float, Range(0, 1)]
AboveZero = Annotated[float, Range(0)]

CONFIG_VARIABLE = "SGLANG_PIC_CONFIG"


class PicConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator can set."""

    core: CoreConfig = msgspec.field(default_factory=CoreConfig)
    mode: Annotated[Literal["auto", "off"], "Mode of requests that name none."] = "auto"
    opt_in: Annotated[
        tuple[str, ...],
        'Extra keys and salts whose requests are spliced unless they ask for `"off"`; overrides `mode` and `share`.',
    ] = ()
    opt_out: Annotated[
        tuple[str, ...], 'Extra keys and salts whose requests always have mode `"off"`, whatever they ask for.'
    ] = ()
    share: Annotated[
        Share,
        "Share of the sessions, chosen by a hash of their names, whose requests are spliced if they name no mode; a "
        "larger share contains the smaller one. A session's name is `session_id`, else the header `x-smg-routing-key`, "
        "else `extra_key` and `cache_salt`; below 1 requests without any of these are not spliced.",
    ] = 1.0
    require_salt: Annotated[bool, 'Serve requests without a `cache_salt` with mode `"off"`, whatever they ask for.'] = (
        False
    )
    strip: Annotated[
        tuple[str, ...],
        f"Known nonces of agents that are removed from prompts before they are tokenized: {', '.join(NONCES)} "
        "([what they are](YOUR_AGENT.md#known-nonces)).",
    ] = ()
    max_gaps: Annotated[
        int, Range(1, 4096), "Most gaps of one request; a batch never has more than the attention backend can take."
    ] = 32
    # Each one is a path that is matched in the radix tree again. A conversation after a clock is one run a turn.
    max_runs: Annotated[
        int, Range(1, 4096), "Most runs of one request; runs that adjoin leave no gap between them."
    ] = 64
    cost_gate: Annotated[
        Literal["auto", "off"] | CostModel,
        'The costs that decide whether a run is worth splicing: `"auto"` measures this machine and model at start-up, '
        '`"off"` takes every run of `core.min_run_tokens` and more, '
        '`{"computed_token_us": .., "spliced_token_us": .., "gap_us": ..}` sets the costs (and `"gap_context_us"`, '
        '`"gap_token_us"`, `"token_context_us"`, `"gap_token_context_us"`, `"request_us"`, `"floor_us"`, '
        '`"gap_floor_us"` unless they are 0).',
    ] = "auto"
    self_test: Annotated[
        Literal["warn", "off", "refuse"],
        "What start-up does if splices of built-in prompts from another context exceed `self_test_kl_limit` or "
        '`self_test_key_limit`: `"warn"` logs it, `"refuse"` stops the server, `"off"` does not test. A wrong splice '
        'stops the server in any case: rows and a gap batch are checked with `"off"`, too.',
    ] = "warn"
    # SmolLM2 measures KL 0.03 and keys 0.18, with keys left unrotated 1.3 and 1.0, with a base a tenth off 0.8 and 0.7
    # (bf16). Random weights measure 1.6 to 2.7 and 0.63 to 0.65.
    self_test_kl_limit: Annotated[
        AboveZero,
        "Nats: mean KL(full || spliced) of the first token in the self-test, with blocks from another context.",
    ] = 0.25
    self_test_key_limit: Annotated[
        AboveZero, "Relative L2 between the keys of those blocks, spliced and computed in full, mean over layers."
    ] = 0.4
    audit_rate: Annotated[
        Share,
        "Share of requests on spliced rows, their own or inherited ones, that are computed again in full while no "
        "request waits; 0 switches audits off.",
    ] = 0.01
    audit_change_rate: Annotated[
        Share,
        "The same share of the requests spliced after a changed field, if larger than `audit_rate`; no effect if that "
        "is 0.",
    ] = 0.05
    audit_kl_limit: Annotated[
        AboveZero,
        "Nats: mean KL(full || spliced) of a namespace's audited requests above which splicing is switched off there.",
    ] = 0.25
    audit_kl_cap: Annotated[AboveZero, "Nats: the most that one audited request counts in that mean."] = 2.0
    audit_window: Annotated[
        int, Range(1, 10_000), "Number of a namespace's last audited requests that the mean covers."
    ] = 32
    audit_min: Annotated[
        int, Range(1, 10_000), "Audited requests that a namespace must have before their mean can switch it off."
    ] = 16
    # A fault is a bug: each may cost the whole index, and a server with repeated faults gains nothing.
    fault_limit: Annotated[
        int,
        Range(1, 1_000_000),
        "Number of faults (exceptions in the plugin) that switches splicing off on the whole server, until the cache "
        "is flushed or the server restarts.",
    ] = 8
    pin_max_percent: Annotated[
        int,
        Range(0, 100),
        "Largest share of the KV pool, in percent, that pins may lock; beyond it those of the lowest priority are "
        "released, the oldest first.",
    ] = 25
    tenant_metrics: Annotated[
        bool, "Count prompt tokens and spliced ones by tenant: 64 at most, each named by a hash of its salt or key."
    ] = False
    checkpoints: Annotated[
        bool,
        "Keep the states of a model with recurrent state where earlier prompts parted, a prompt earlier than SGLang "
        "does. No effect on other models, or with `--mamba-radix-cache-strategy no_buffer`.",
    ] = True
    certificate: Annotated[
        str | None,
        "Path of a certificate of `sglang-pic tune`, relative to the configuration's folder. Start-up logs whether it "
        "fits this server.",
    ] = None

    def without_secrets(self) -> PicConfig:
        """The configuration for logs and `/server_info`, without salts, which are secrets."""
        return msgspec.structs.replace(self, opt_in=("*",) * len(self.opt_in), opt_out=("*",) * len(self.opt_out))

    def __post_init__(self) -> None:
        check(self)
        for name in self.strip:
            if name not in NONCES:
                raise ConfigError(
                    f"strip={name!r}: not a known nonce; allowed are {', '.join(NONCES)}{did_you_mean(name, NONCES)}"
                )
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
    source, folder = "the JSON text", Path()
    if not text.lstrip().startswith("{"):
        source, folder = text, Path(text).parent
        try:
            text = Path(text).read_text(encoding="utf8")
        except OSError as error:
            raise ConfigError(
                f"{CONFIG_VARIABLE}={source!r}: neither a JSON object nor a readable file ({error.strerror}); "
                f'give {{"core": {{"seam_tokens": 1}}}} or the path of such a file.'
            ) from error
        except ValueError as error:
            raise ConfigError(f"{CONFIG_VARIABLE}={source!r}: not UTF-8 ({error}); save it as UTF-8.") from error
    try:
        given = msgspec.json.decode(text)
        if isinstance(given, dict) and isinstance(core := given.setdefault("core", {}), dict):
            given["core"] = with_preset(core)
        config = msgspec.convert(given, PicConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}{_hint(str(error))} (in {source}).") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {source} is not valid JSON: {error}.") from error
    if config.certificate is not None:
        config = msgspec.structs.replace(config, certificate=str(folder / config.certificate))
    return config


def _hint(error: str) -> str:
    """What is allowed in the place of a key or a value that msgspec refuses; empty if nothing can be said."""
    found, settings = re.search(r"`\$\.(.*)`$", error), settings_of(PicConfig)
    place = found[1] if found else ""
    if unknown := re.match(r"Object contains unknown field `(.*?)`", error):
        name = unknown[1].rpartition(".")[2]
        known = [*settings, *(f"cost_gate.{each}" for each in settings_of(CostModel))]
        for each in known:
            outer, _, last = each.rpartition(".")
            if last == name:
                return f"; its place is in {outer}" if outer else f"; its place is beside {place or 'core'}"
        return did_you_mean(f"{place}.{name}" if place else name, known)
    return f"; must be {settings[place].allowed}" if place in settings and settings[place].allowed else ""


def load_config() -> PicConfig:
    """The configuration of this process: `SGLANG_PIC_CONFIG`, or the defaults if it is not set.

    Raises:
        ConfigError: as `read_config`.
    """
    return read_config(os.environ.get(CONFIG_VARIABLE, "").strip() or "{}")
