"""Compares the server's certificate with the server, before its first request. Nothing depends on the outcome."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from sglang_pic.adapter.contract import installed_version
from sglang_pic.adapter.seams import BuildContext
from sglang_pic.adapter.startup import metrics
from sglang_pic.adapter.startup.fingerprint import read_weights
from sglang_pic.certificate import Checked, Served, check_certificate, policy_settings
from sglang_pic.config import PicConfig
from sglang_pic.runtime.splice import Splicer

logger = logging.getLogger(__name__)


def check(
    path: str, ctx: BuildContext, config: PicConfig, splicer: Splicer, labels: Mapping[str, str] | None
) -> Checked:
    """Say in the log, on one rank, and in a metric whether a certificate fits; all ranks must call this together.

    Args:
        path: of the certificate.
        labels: as `Series` takes them.
    """
    runner = ctx.tp_worker.model_runner
    here = Served(
        model=Path(ctx.server_args.model_path).name,
        weights=read_weights(runner, ctx.tp_group),
        sglang=installed_version(),
        dtype=str(ctx.model_config.dtype).removeprefix("torch."),
        kv_dtype=str(splicer.view.dtype).removeprefix("torch."),
        attention=runner.prefill_attention_backend_str,
        page_size=ctx.params.page_size,
        settings=policy_settings(config.core),
    )
    checked = check_certificate(path, here)
    if ctx.tp_rank == 0:
        logger.log(logging.INFO if checked.fits else logging.WARNING, "sglang_pic: %s", checked.said)
    metrics.export_certificate(checked.fits, labels)
    return checked
