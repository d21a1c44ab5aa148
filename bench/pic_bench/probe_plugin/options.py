"""The options of experiments: switches of a server, and options of a single request."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from pic_bench.probe_plugin import PROBE_VARIABLE
from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.core import ReusePolicy
from sglang_pic.errors import ConfigError

_RECORD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class ProbeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The switches of a server, as JSON in `SGLANG_PIC_PROBE`."""

    ignore_prefix: Annotated[
        bool,
        "Serve nothing from the exact prefix, so that a repeated prompt is spliced from its own chunks at shift 0.",
    ] = False
    check_invariants: Annotated[bool, "Check the whole chunk index after every publication (slow)."] = False
    request_options: Annotated[bool, "Take `custom_params.pic.testing`, the options of `RequestProbe`."] = False
    sharp_dummy: Annotated[
        bool,
        "Scale SGLang's dummy weights, which are so small that an answer hardly depends on the KV, to those of a model"
        " whose attention chooses. Of a stock server too.",
    ] = False
    sync_debug: Annotated[
        bool, "Have torch warn of every operation that makes the host wait for the GPU, from the first gap batch on."
    ] = False
    replay_lora: Annotated[
        bool,
        "Let captured prefill graphs replay gap batches with LoRA adapters, which no device has shown to be right.",
    ] = False
    watch_rows: Annotated[
        bool,
        "Watch every KV row, account for every slot and lock (`accounting` in `/server_info`); slow, on a CPU.",
    ] = False
    record_dir: Annotated[str | None, "Folder for the logits of requests with `testing.record`."] = None

    @property
    def names_on(self) -> list[str]:
        """The switches that are on."""
        return [name for name in self.__struct_fields__ if getattr(self, name)]


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part `probe` of `/server_info`."""

    switches: ProbeConfig
    is_idle: bool
    """No request has a row."""
    num_gap_passes: int = 0
    """Of the target model, since start-up."""
    num_replayed: int = 0
    """Of these, the passes that a captured graph replayed."""


class RequestProbe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a request of an experiment, under `custom_params.pic.testing`."""

    donors_from: Annotated[
        str | None,
        "The `extra_key` whose donors serve this request. Its own rows stay in its own namespace, so that requests of "
        "an experiment neither see nor feed each other.",
    ] = None
    rotate: Annotated[bool, "False copies keys as they are: the naive control."] = True
    flip_donors: Annotated[
        bool,
        "Turn the signs of every spliced row: a corruption for the audit to find. (Rows in another order would be "
        "none: a key carries its position with it.)",
    ] = False
    unlock_donors: Annotated[
        bool, "Give the donors' locks back as soon as the request is planned: a fault for `watch_rows` to find."
    ] = False
    policy: Annotated[
        dict[str, int | str],
        "Settings of the reuse policy for this request alone, any of them and within the bounds of the configuration.",
    ] = {}
    record: Annotated[str | None, "Name of the file in `record_dir` that gets what this request computed."] = None

    def __post_init__(self) -> None:
        if self.record is not None and not _RECORD_NAME.fullmatch(self.record):
            raise ValueError(f"record={self.record!r}: must be 1 to 128 letters, digits, '.', '_' or '-'.")
        msgspec.convert(self.policy, ReusePolicy)


class ProbedOptions(RequestOptions, frozen=True, kw_only=True):
    """The options of a request with those of the experiment."""

    probe: RequestProbe


def load() -> ProbeConfig:
    """The switches of this process.

    Raises:
        ConfigError: the variable is not a JSON object of known switches.
    """
    text = os.environ[PROBE_VARIABLE]
    try:
        return msgspec.json.decode(text, type=ProbeConfig)
    except msgspec.DecodeError as error:
        allowed = ", ".join(ProbeConfig.__struct_fields__)
        raise ConfigError(
            f"{PROBE_VARIABLE}={text!r}: {error}; give a JSON object with any of {allowed}, or unset the variable."
        ) from error


def parse_probed(original: Callable[[object], RequestOptions], custom_params: object) -> RequestOptions:
    """Around `parse_options`: the options of a request and, where it has any, those of the experiment.

    Raises:
        ConfigError: naming the value and what is allowed.
    """
    pic = custom_params.get("pic") if isinstance(custom_params, Mapping) else None
    if not isinstance(custom_params, Mapping) or not isinstance(pic, Mapping) or "testing" not in pic:
        return original(custom_params)
    try:
        probe = msgspec.convert(pic["testing"], RequestProbe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"custom_params.pic.testing: {error}") from error
    options = original({**custom_params, "pic": {name: value for name, value in pic.items() if name != "testing"}})
    settings = {**probe.policy, **options.overrides}
    return ProbedOptions(**msgspec.structs.asdict(options) | {"overrides": settings}, probe=probe)


def probe_of(req: Any) -> RequestProbe:
    """The options of an admitted request."""
    options = req.pic.options
    return options.probe if isinstance(options, ProbedOptions) else RequestProbe()
