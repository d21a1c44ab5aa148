"""Compares the configured certificate with the server before its first request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.probe.ranks import check_alike
from sglang_pic.adapter.sglang.contract import installed_version
from sglang_pic.adapter.sglang.seams import BuildContext
from sglang_pic.adapter.startup.fingerprint import read_weights
from sglang_pic.adapter.support import prefill_backend
from sglang_pic.certificate import Checked, Served, check_certificate, policy_settings
from sglang_pic.config import PicConfig
from sglang_pic.runtime.splice import Splicer

logger = logging.getLogger(__name__)

FITS: Final = Metric(
    "sglang:pic_certificate_fits",
    MetricKind.GAUGE,
    "1 if the configured certificate fits this model, its rows and these settings, else 0; absent without one.",
)
METRICS: Final = (FITS,)


def certify(ctx: BuildContext, config: PicConfig, splicer: Splicer, labels: Mapping[str, str] | None) -> Checked | None:
    """Compare the configured certificate with this server; logs on one rank, and exports, whether it fits.

    All ranks must call this together, with equal configurations.

    Args:
        labels: as for `Series`.

    Returns:
        The part of `/server_info`; None if no certificate was configured.

    Raises:
        UnsupportedError: ranks found different certificates.
    """
    if config.certificate is None:
        return None
    weights = read_weights(ctx.tp_worker.model_runner, ctx.tp_group)
    here = served_by(ctx, config, splicer.view.dtype, ctx.params.page_size, weights)
    checked = check_certificate(config.certificate, here)
    check_alike({"certificates": str(checked).encode()}, ctx.tp_group)
    if ctx.tp_rank == 0:
        logger.log(logging.INFO if checked.fits else logging.WARNING, "sglang_pic: %s", checked.said)
    Series(METRICS, labels).set(FITS, checked.fits)
    return checked


def served_by(
    ctx: BuildContext, config: PicConfig, rows: torch.dtype, page_size: int, weights: str | None = None
) -> Served:
    """What a server's answers depend on; the dtype is that of its KV rows, the weights' digest is None if unread."""
    return Served(
        model=Path(ctx.server_args.model_path).name,
        weights=weights,
        sglang=installed_version(),
        dtype=str(ctx.model_config.dtype).removeprefix("torch."),
        kv_dtype=str(rows).removeprefix("torch."),
        attention=prefill_backend(ctx.tp_worker.model_runner),
        page_size=page_size,
        settings=policy_settings(config.core),
    )
