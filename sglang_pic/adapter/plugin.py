"""The entry point `sglang.srt.plugins`: check the contract, then register everything or nothing.

SGLang runs it in every process, before it parses the server's arguments, and swallows exceptions, so a failure that the
operator must see is a `SystemExit`.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from itertools import pairwise
from typing import Any

from sglang_pic.adapter.serve import frontend
from sglang_pic.adapter.serve.frontend import BACKEND_NAME
from sglang_pic.adapter.startup import draft_workers
from sglang_pic.config import load_config
from sglang_pic.errors import ConfigError, ContractError, PicError

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend `pic` and the front end's hooks.

    Raises:
        SystemExit: the command line asks for the backend, and the configuration is not allowed, or SGLang differs from
            what this version was built for.
    """
    from sglang_pic.adapter.sglang.contract import CONTRACT, FRONT, check_contract

    is_requested = _is_requested(sys.argv)
    try:
        if is_requested:
            load_config()  # Before weights and pools are loaded; the scheduler reads it again.
        changed = check_contract(CONTRACT if is_requested else FRONT)
    except (ConfigError, ContractError) as error:
        if is_requested:
            raise SystemExit(f"sglang_pic: {error}") from error
        logger.error("sglang_pic: not registered: %s", error)
        return
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    frontend.install()
    draft_workers.install()
    register_radix_cache_backend(BACKEND_NAME, partial(_create_cache, changed if is_requested else None))


def _create_cache(changed: list[str] | None, ctx: Any) -> Any:
    # Imported here: only schedulers with the backend load torch and the core.
    from sglang_pic.adapter.factory import create_cache
    from sglang_pic.adapter.sglang.contract import check_contract

    try:
        # The backend may be set in a file, or by a program, too.
        return create_cache(ctx, changed_bodies=check_contract() if changed is None else changed)
    except PicError as error:
        logger.error("sglang_pic: %s", error)
        raise


def _is_requested(argv: list[str]) -> bool:
    """Whether the command line asks for `--radix-cache-backend pic`, in either spelling."""
    flag = "--radix-cache-backend"
    return f"{flag}={BACKEND_NAME}" in argv or (flag, BACKEND_NAME) in pairwise(argv)
