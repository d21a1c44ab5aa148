"""Records the logits of an experiment's request over the whole vocabulary.

One `NAME.npz` in `record_dir` for each request that asks, complete when the request's answer arrives. It has `logits`,
`[num_positions, vocab_size]` float32, from the first position whose logprob was asked for, or the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pic_bench.probe_plugin.options import probe_of
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature

logger = logging.getLogger(__name__)


class Recorder(Feature):
    """Watches forward passes.

    Args:
        folder: where the files go; made if it is not there.
    """

    fault = Fallback.FAULT_GAPS

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logits: list[torch.Tensor] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def watch(self, batch: Any) -> Callable[[Any], None] | None:
        """Record a request that asks for it, has the batch to itself and ends its prompt in it."""
        self._logits = None
        asking = [req for req in batch.reqs if probe_of(req).record is not None]
        if len(batch.reqs) > 1:
            for req in asking:
                logger.warning("sglang_pic: request %s shares its batch and is not recorded", req.rid)
            return None
        # A pass that ends earlier is one of a chunked prefill.
        if not asking or asking[0].extend_end != len(asking[0].full_untruncated_fill_ids):
            return None
        (req,) = asking
        self._logits = []
        return lambda _output: self._write(req)

    def keep(self, logits: torch.Tensor, *_args: object, **_kwargs: object) -> None:
        """The hook on `LogitsProcessor._get_logits`."""
        if self._logits is not None:
            self._logits.append(logits.detach().to(torch.float32).cpu().clone())

    def _write(self, req: Any) -> None:
        assert self._logits is not None, "what watches the pass is told of it once"
        logits, self._logits = torch.cat(self._logits).numpy(), None
        path = self._folder / f"{probe_of(req).record}.npz"
        # A reader that polls must never see half a file.
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, logits=logits)
        partial.replace(path)
