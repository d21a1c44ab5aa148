"""Compares certificates with the server before its first request, and resolves the preset `"certified"`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from sglang_pic.adapter.probe.ranks import check_alike
from sglang_pic.adapter.sglang.contract import installed_version
from sglang_pic.adapter.sglang.seams import BuildContext
from sglang_pic.adapter.startup import startup_metrics as metrics
from sglang_pic.adapter.startup.fingerprint import read_weights
from sglang_pic.adapter.support import disaggregation_mode, prefill_backend
from sglang_pic.certificate import Checked, Served, check_certificate, choose_preset, policy_settings
from sglang_pic.config import PicConfig, UncertifiedConfig, load_config
from sglang_pic.runtime.splice import Splicer

logger = logging.getLogger(__name__)

_ON_SPLIT_SERVERS = "prefill and decode servers must have one preset, and may find different certificates: name it"


def certify(
    ctx: BuildContext, config: PicConfig, splicer: Splicer, labels: Mapping[str, str] | None
) -> tuple[PicConfig, Checked | None]:
    """Resolve the preset; logs on one rank, and exports, whether a certificate fits.

    All ranks must call this together, with equal configurations.

    Args:
        labels: as for `Series`.

    Returns:
        The configuration to serve, and the part of `/server_info`; None if no certificate was configured.

    Raises:
        UnsupportedError: ranks found different certificates.
    """
    if config.certificate is None and not isinstance(config, UncertifiedConfig):
        return config, None
    runner = ctx.tp_worker.model_runner
    here = Served(
        model=Path(ctx.server_args.model_path).name,
        weights=read_weights(runner, ctx.tp_group),
        sglang=installed_version(),
        dtype=str(ctx.model_config.dtype).removeprefix("torch."),
        kv_dtype=str(splicer.view.dtype).removeprefix("torch."),
        attention=prefill_backend(runner),
        page_size=ctx.params.page_size,
        settings=policy_settings(config.core),
    )
    config, checked = settle(config, here, disaggregation_mode(ctx))
    check_alike({"certificates": f"{config.core.preset} {checked}".encode()}, ctx.tp_group)
    if checked is not None:
        if ctx.tp_rank == 0:
            logger.log(logging.INFO if checked.fits else logging.WARNING, "sglang_pic: %s", checked.said)
        metrics.export_certificate(checked.fits, labels)
    return config, checked


def settle(config: PicConfig, here: Served, disaggregation: str) -> tuple[PicConfig, Checked | None]:
    """The configuration with the preset of the certificate that fits, and the result for log and `/server_info`.

    Args:
        here: the server, with the settings of `config`.
        disaggregation: SGLang's `--disaggregation-mode`.
    """
    if not isinstance(config, UncertifiedConfig):
        return config, None if config.certificate is None else check_certificate(config.certificate, here)
    if disaggregation != "null":
        return config, _careful(_ON_SPLIT_SERVERS, here)
    preset, path, passed = choose_preset(config.certificate, here)
    config = load_config(certified=preset)
    if path is None:
        why = "; ".join(passed) or f"there is none of {'this model' if here.weights else f'a model {here.model!r}'}"
        return config, _careful(f"no certificate fits ({why}): make one with sglang-pic tune, and name it", here)
    checked = check_certificate(path, replace(here, settings=policy_settings(config.core)))
    return config, replace(checked, said=f"preset certified is {preset}, by {Path(path).name}: {checked.said}")


def _careful(why: str, here: Served) -> Checked:
    return Checked(fits=False, said=f"preset certified is careful: {why}", here=here)
