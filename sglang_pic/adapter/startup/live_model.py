"""Reads the live model, its drafts and its tokenizer before anything is computed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from sglang.srt.runtime_context import get_schedule

from sglang_pic.adapter.probe.ranks import check_alike
from sglang_pic.adapter.serve.planning import Limits
from sglang_pic.adapter.sglang.seams import BuildContext, ModelRunner
from sglang_pic.adapter.startup.drafts import Draft, read_drafts
from sglang_pic.adapter.startup.tokenizer import Tokenizer, delimiters_of, read_tokenizer, texts_of
from sglang_pic.adapter.support import max_keys, max_sequences
from sglang_pic.config import PicConfig
from sglang_pic.core import Lexicon, PositionSteps
from sglang_pic.runtime.live_pools import view_pool
from sglang_pic.runtime.rope import read_geometry
from sglang_pic.runtime.splice import Splicer

logger = logging.getLogger(__name__)


class LiveModel(NamedTuple):
    """What is the same on every rank."""

    runner: ModelRunner
    splicer: Splicer
    drafts: Sequence[Draft]
    """A row depends on one later token for each draft."""
    tokenizer: Tokenizer | None
    delimiters: frozenset[int]
    lexicon: Lexicon | None
    limits: Limits


def read_live_model(ctx: BuildContext, config: PicConfig) -> LiveModel:
    """Read a model whose server is supported; all ranks must call this together.

    Raises:
        ContractError: the model's rotation differs from what its rotary module says, or its draft is not SGLang's.
        UnsupportedError: a pool or a draft is not supported, or ranks read different values.
    """
    runner: ModelRunner = ctx.tp_worker.model_runner
    splicer = Splicer(
        view_pool(runner.token_to_kv_pool), read_geometry(runner.model, max_shift=ctx.model_config.context_len)
    )
    drafts = read_drafts(ctx, splicer)
    tokenizer, lost = read_tokenizer(ctx.server_args)
    if lost:
        logger.warning("sglang_pic: %s", lost)
    delimiters = frozenset() if tokenizer is None else delimiters_of(tokenizer)
    texts = None if tokenizer is None else texts_of(tokenizer, delimiters)
    check_alike(
        {
            "configurations": repr(config).encode(),
            "delimiters": msgspec.json.encode(sorted(delimiters)),
            "texts of tokens": msgspec.json.encode(texts),
        },
        ctx.tp_group,
    )
    runners = [runner, *(draft.runner for draft in drafts)]
    chunk, steps = ctx.model_config.attention_chunk_size, splicer.geometry.steps
    limits = Limits(
        max_sequences=min(map(max_sequences, runners)),
        max_keys=min(map(max_keys, runners)),
        max_extend=max_extend(ctx) if drafts else None,
        steps=(*([] if steps is None else [steps]), *([PositionSteps(chunk)] if chunk else [])),
    )
    return LiveModel(runner, splicer, drafts, tokenizer, delimiters, None if texts is None else Lexicon(texts), limits)


def max_extend(ctx: BuildContext) -> int | None:
    """The most tokens of a batch with splices beside a draft, spliced ones included; None for no limit.

    A draft is given the embeddings of a whole batch with media, which SGLang copies once more: with two chunks that is
    four times a chunk, and stock SGLang's own pass over a full chunk has its embeddings three times.
    """
    chunk = get_schedule().chunked_prefill_size or 0
    return 2 * chunk if ctx.model_config.is_multimodal and chunk > 0 else None
