"""Prefill and decode on servers of their own (PD disaggregation).

A prefill server splices as any other; SGLang sends the rows of a request after its pass, spliced or computed. A decode
server computes no prompts. With `--disaggregation-decode-enable-radix-cache` it keeps received rows as prefixes of
later requests, so a request has the same key in both servers' trees: requests that opted out get no spliced rows.

The decode server returns the counts of spliced tokens to the client. The prefill server sends them in spare places of
SGLang's metadata of cached tokens, and whether the rows may depend on splices: while an operator switches one server
after the other off or on, only one of them serves a request as if it had opted out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from sglang.srt.mem_cache.registry import default_radix_cache_factory

from sglang_pic.adapter.namespace import OFF_LANE
from sglang_pic.adapter.serve import receive as reception
from sglang_pic.adapter.serve.fallback import REASONS
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.serve.state import Counts, RequestState, is_apart
from sglang_pic.adapter.sglang.hooks import apply_hooks, hook
from sglang_pic.adapter.sglang.seams import BuildContext, Req
from sglang_pic.adapter.support import disaggregation_mode
from sglang_pic.core import ReusePolicy

logger = logging.getLogger(__name__)

_COUNTS: Final = slice(11, 16)
"""Places of our counts among the 16 numbers of a request; the contract checks that SGLang does not use 7 to 15."""


def make_sender(ctx: BuildContext, _: object) -> None:
    """Register the hook of a prefill server; SGLang applies it when its registry is applied."""
    if disaggregation_mode(ctx) == "prefill":
        hook(__name__, "MetadataBuffers.set_buf", _send_counts)


def create_decode_cache(ctx: BuildContext, policy: ReusePolicy, modes: Modes) -> Any:
    """SGLang's own cache for a decode server, whose requests get their keys from `install_receiver`."""
    install_receiver(policy, modes)
    apply_hooks()
    logger.info("sglang_pic: a decode server computes no prompts: nothing is spliced here, namespaces are separated")
    return default_radix_cache_factory(ctx)


def install_receiver(policy: ReusePolicy, modes: Modes) -> None:
    """Register the hooks of a decode server, with the policy and modes of its prefill server: lanes are the same."""
    features = Features()

    def on_request(_: None, req: Req, *args: object, **kwargs: object) -> None:
        try:
            reception.receive(req, features, policy, modes)
        except Exception:
            logger.exception("sglang_pic: request %s failed to be received, and gets no spliced rows", req.rid)
            reception.serve_as_opted_out(req)

    hook(__name__, "Req.__init__", on_request)
    hook(__name__, "Req.build_rebootstrap_payload", _ask_again)
    hook(__name__, "DecodeTransferQueue._commit_transfer_to_req", _receive_counts)
    modes.install()
    reception.install_details()


@contextmanager
def _guarded(req: Any) -> Iterator[None]:
    """Log an exception instead of ending the server: only counts are lost."""
    try:
        yield
    except Exception:
        logger.exception("sglang_pic: request %s is answered without its counts of spliced tokens", req.rid)


def _send_counts(_: None, buffers: Any, req: Any) -> None:
    with _guarded(req):
        counts: Counts = req.pic.counts
        # 0 is no reason; both servers run one version.
        reason = 0 if counts.reason is None else 1 + REASONS.index(counts.reason)
        # A stock server leaves zeros, and splices nothing.
        last = 2 * reason + (not is_apart(req))
        sent = [counts.chunk_hit, counts.behind_change, counts.guarded, counts.inherited, last]
        buffers.cached_tokens[req.metadata_buffer_index, _COUNTS] = torch.tensor(sent, dtype=torch.int32)


def _receive_counts(original: Callable[..., None], queue: Any, decode_req: Any) -> None:
    req = decode_req.req
    original(queue, decode_req)
    # SGLang ends a request that received another one's metadata.
    if req.finished_reason is None:
        with _guarded(req):
            state: RequestState = req.pic
            counts: Counts = state.counts
            sent = queue.metadata_buffers.cached_tokens[decode_req.metadata_buffer_index, _COUNTS].tolist()
            counts.chunk_hit, counts.behind_change, counts.guarded, counts.inherited, last = sent
            reason, may_be_spliced = divmod(last, 2)
            # NOTE: in the lane of requests that opted out, this server's tree has no spliced rows.
            req.skip_radix_cache_insert |= bool(may_be_spliced) and state.lane == OFF_LANE
            if reason:
                counts.reasons[REASONS[reason - 1]] += 1


def _ask_again(payload: dict[str, Any], req: Req) -> dict[str, Any]:
    """Have the prefill server compute a prompt again in the same namespace and lane.

    SGLang sends the request's key in the tree, which has marks that the front end refuses, and not its options.
    """
    state: RequestState = req.pic
    if req.lora_id is not None:
        # NOTE: the key stays marked, so that the prefill server sends no rows of the bare model for the adapter's.
        logger.error(
            "sglang_pic: request %s ends: SGLang would compute its prompt again without its LoRA adapter", req.rid
        )
        return payload
    # Without `pin` and `unpin`, which were applied when it was first served.
    options = {**state.options.overrides, "skills": state.options.skills.value}
    mode = Mode.OFF if state.lane == OFF_LANE else Mode.AUTO
    return {
        **payload,
        "extra_key": state.namespace.extra_key,
        "sampling_params": {
            **payload["sampling_params"],
            "custom_params": {"pic": {**options, "mode": mode.value}},
        },
    }
