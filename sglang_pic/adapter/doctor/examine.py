"""Runs the checks of start-up for a server without starting it, and collects every refusal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from sglang_pic.adapter.doctor.findings import Finding, Findings
from sglang_pic.adapter.doctor.server import Resolved, resolve
from sglang_pic.adapter.sglang.contract import (
    changed_attention,
    check_contract,
    describe_changes,
    installed_version,
)
from sglang_pic.adapter.startup.certified import served_by
from sglang_pic.adapter.startup.tokenizer import read_tokenizer
from sglang_pic.adapter.support import (
    SUPPORT,
    Area,
    Level,
    Support,
    check_features,
    disaggregation_mode,
    find,
    prefix_only,
    present,
    refusals,
)
from sglang_pic.certificate import check_certificate
from sglang_pic.config import PicConfig, load_config
from sglang_pic.errors import ConfigError, ContractError, UnsupportedError
from sglang_pic.runtime.rope import refuse_length

_ATTEND = (
    'With core.reordered="attend" start-up tries whether the model finds what a question asks for, and stops the '
    "server if it does not, or if it can have no second pass."
)

_AS_TESTED = "SGLang has every function and class that the plugin uses, as tested"


def examine(model: str | None, flags: Sequence[str], *, card: str | None) -> Findings:
    """Run the checks of start-up that need only the arguments and the model's configuration.

    Args:
        model: as `sglang serve` takes it; if None, only installed versions are checked.
        flags: further flags of the server.
        card: a key of `CARDS` to answer for; this machine if None.

    Raises:
        ConfigError: the plugin's configuration is not allowed, the model cannot be read, or a flag is none of SGLang's.
    """
    if model is None and flags:
        raise ConfigError(f"server flags {shlex.join(flags)!r}: name a MODEL before `--` to check them with.")
    found, config = [*_packages()], load_config()
    refused: list[str] = []
    computed: list[str] = []
    changed: list[str] = []
    certificate: str | None = None
    contract, machine, reason = "", card or "this machine", ""
    try:
        changed += check_contract()
        if model is not None:
            with resolve(model, flags, card=card) as resolved:
                machine = card or f"this machine, --device {resolved.view.device}"
                reason = prefix_only(resolved.context)
                if reason:
                    found += map(_finding, present(resolved.context, Level.PREFIX_ONLY))
                else:
                    changed += changed_attention(resolved.attention)
                    found += _server(resolved)
                    computed += _computed(resolved)
                    if config.core.reordered == "attend":
                        computed.append(_ATTEND)
                    refused += refusals_of(resolved)
                    changed += check_features(resolved.context)
                    certificate = _certificate(resolved, config)
    except ContractError as error:
        contract = "broken"
        refused.append(str(error))
    except UnsupportedError as error:
        refused.append(str(error))
    return Findings(
        command=shlex.join(["sglang", "serve", model or "MODEL", "--radix-cache-backend", "pic", *flags]),
        machine=machine,
        findings=found,
        contract=contract or (describe_changes(changed) if changed else _AS_TESTED),
        certificate=certificate,
        computed=computed,
        prefix_only="" if refused else reason,
        refused=refused,
    )


def refusals_of(resolved: Resolved) -> Iterator[str]:
    """Every refusal of start-up that does not need the weights, one line each."""
    yield from refusals(resolved.context)
    if prefix_only(resolved.context) or disaggregation_mode(resolved.context) == "decode":
        return
    try:
        refuse_length(f"{resolved.embedding}", resolved.rotary, resolved.context.model_config.context_len)
    except UnsupportedError as error:
        yield str(error)
    pool = None if resolved.pool is None else find(Area.POOL, resolved.pool)
    for judged in (_embedding(resolved), _rows(resolved), *([] if pool is None else [pool])):
        if judged.level is Level.REFUSED:
            yield judged.refused.line(judged.what)


def _certificate(resolved: Resolved, config: PicConfig) -> str | None:
    """The message of start-up on the certificate, without the checks of the weights; None if none is configured."""
    if config.certificate is None:
        return None
    here = served_by(resolved.context, config, resolved.dtype, resolved.view.page_size)
    return check_certificate(config.certificate, here).said


def _packages() -> Iterator[Finding]:
    yield _finding(_judge(Area.SGLANG, installed_version()))
    for package in ("torch", "triton"):
        try:
            # Without the build: `2.13.0+cpu`.
            yield _finding(_judge(Area.PACKAGE, f"{package} {version(package).partition('+')[0]}"))
        except PackageNotFoundError:
            yield _finding(Support(Area.PACKAGE, Level.ADMITTED, f"{package} (not installed)", "SGLang brings it"))


def _server(resolved: Resolved) -> Iterator[Finding]:
    view = resolved.view
    yield _finding(_judge(Area.MODEL, resolved.architecture))
    yield _finding(_embedding(resolved))
    yield _finding(_judge(Area.ATTENTION, resolved.attention, others="any other"))
    yield _finding(_rows(resolved))
    yield _finding(_judge(Area.POOL, f"pages of {view.page_size}", others="pages of any other size"))
    yield _finding(_judge(Area.TOPOLOGY, f"tensor parallelism of {view.tp_size}"))
    yield from map(_finding, present(resolved.context, Level.TESTED, Level.ADMITTED))


def _embedding(resolved: Resolved) -> Support:
    if resolved.embedding is None:
        return Support(Area.EMBEDDING, Level.ADMITTED, "not named in the configuration", "start-up reads it")
    return _judge(Area.EMBEDDING, f"{resolved.embedding}", others="any other")


def _rows(resolved: Resolved) -> Support:
    return _judge(Area.POOL, f"rows of {resolved.dtype}".replace("torch.", ""), others="rows of any other dtype")


def _judge(area: Area, what: str, *, others: str | None = None) -> Support:
    """The support entry for `what`, else that for `others`, else the one for untested members of the area."""
    entry = find(area, what) or (None if others is None else find(area, others))
    if entry is None:
        entry = [entry for entry in SUPPORT if entry.area is area and entry.level is Level.ADMITTED][-1]
    return entry._replace(what=what)


def _finding(judged: Support) -> Finding:
    # No GPU has run any test.
    level = "CPU only" if judged.level is Level.TESTED else judged.level.shown
    return Finding(area=judged.area.value, what=judged.what, level=level, reason=judged.reason)


def _computed(resolved: Resolved) -> Iterator[str]:
    for entry in present(resolved.context, Level.FALLS_BACK):
        owner, _, name = entry.path.split()[0].rpartition(".")
        why = f"--{name.replace('_', '-')}" if owner == "server_args" else "this model takes media"
        yield f"{entry.reason} ({why})"
    _, lost = read_tokenizer(resolved.context.server_args)
    if lost:
        yield lost
    yield from (entry.reason for entry in SUPPORT if entry.level is Level.FALLS_BACK and not entry.path)
