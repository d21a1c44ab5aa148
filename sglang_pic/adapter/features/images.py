"""Images in prompts: unique core tokens for each image, and the rotation of rows after images.

SGLang gives the tokens of an image values made of its hash. Here an image with another hash, shape or positions gets
core tokens of its own, one for each place, so equal core tokens are equal images.

With M-RoPE an image advances positions by less than its tokens. After text and whole images, a token's position is its
place less their *lag*, on all three axes; the keys of a run are rotated by the difference of positions.

    places     0 1 2 3 [4 5 6 7 8 9]  10 11      an image of 2 x 3 tokens, whose lag is 3
    positions  0 1 2 3 [4 . . . . .]   7  8
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.media import Media, TextOnly
from sglang_pic.adapter.sglang.seams import BuildContext, MediaItem, Req
from sglang_pic.adapter.support import always_computed
from sglang_pic.core import MEDIA_FROM, Run, Span, Tokens

logger = logging.getLogger(__name__)

# Most remembered images, and the end of their ids.
_MOST_IMAGES = 1 << 16
_IDS_END = 1 << 31
# SGLang repeats so many values over the tokens of an image.
_NUM_VALUES = 4
# Larger values of an item are pixels, which its hash covers.
_MOST_BYTES = 1 << 10

Ids = npt.NDArray[np.int64]
"""Token ids as SGLang has them."""


class Lags(NamedTuple):
    """The lags of a path: place less position."""

    ends: Sequence[int]
    """Ends of its images."""
    sums: Sequence[int]
    """The lag before the first image, and after each."""

    def at(self, place: int) -> int:
        """The lag at a place outside images, or at an image's first place."""
        return self.sums[bisect_right(self.ends, place)]


class _Image(NamedTuple):
    """A remembered image."""

    key: bytes
    """Digest of its hash, shape and positions."""
    first: int
    """Its first core token."""
    num_tokens: int
    lag: int
    values: Ids
    """SGLang's values for its tokens, which repeat."""


class Images(TextOnly):
    """The images in this server's requests, alike on every rank.

    Args:
        is_mrope: whether the model has M-RoPE; without it an image advances positions by its tokens.
    """

    def __init__(self, *, is_mrope: bool) -> None:
        self._is_mrope = is_mrope
        self._next_id = MEDIA_FROM
        # By SGLang's values, oldest first; at most `_MOST_IMAGES`. `None`: several images have these values.
        self._known: OrderedDict[bytes, _Image | None] = OrderedDict()
        self._by_first: dict[int, _Image] = {}

    def read(self, req: Req) -> Media | None:
        """The images of a request; `None` if its prompt cannot be spliced.

        That is, unless its media are whole images, each with values of its own, and positions are as described above.
        """
        ids = np.frombuffer(req.full_untruncated_fill_ids, dtype=np.int64)
        inputs = req.multimodal_inputs
        assert inputs is not None, "it has media"
        items = inputs.mm_items
        if not items or any(not item.is_image() or len(item.offsets or ()) != 1 for item in items):
            return None
        placed = [((item.offsets[0][0], item.offsets[0][1] + 1), item) for item in items if item.offsets]
        placed.sort(key=itemgetter(0))
        spans = tuple(span for span, _ in placed)
        edges = [0, *itertools.chain.from_iterable(spans), len(ids)]
        is_text = np.ones(len(ids), dtype=np.bool_)
        for span in spans:
            is_text[slice(*span)] = False
        is_apart = edges == sorted(edges) and all(start < end for start, end in spans)
        if not is_apart or (ids[is_text] >= MEDIA_FROM).any():
            return None
        positions = self._positions(inputs.mrope_positions, len(ids))
        if positions is None:
            return None
        lags = [0, *itertools.accumulate(_lag(positions, span) for span in spans)]
        expected = np.arange(len(ids)) - np.repeat(lags, np.diff([0, *(end for _, end in spans), len(ids)]))
        is_plain = (positions[:, is_text] == expected[is_text]).all() and min(np.diff(lags), default=0) >= 0
        if not is_plain or any(positions[:, start].min() != expected[start] for start, _ in spans):
            return None
        found = [
            self._find(item, ids[slice(*span)], positions[:, slice(*span)] - expected[span[0]], after - before)
            for (span, item), (before, after) in zip(placed, itertools.pairwise(lags), strict=True)
        ]
        firsts = tuple(image.first for image in found if image is not None)
        return Media(spans, firsts, tuple(lags)) if len(firsts) == len(spans) else None

    def _positions(self, mrope_positions: torch.Tensor | None, num_tokens: int) -> Ids | None:
        """The positions of all tokens, `[3, num_tokens]`; `None` if SGLang did not give them."""
        if not self._is_mrope:
            return np.broadcast_to(np.arange(num_tokens), (3, num_tokens))
        if mrope_positions is None:
            return None
        positions: Ids = mrope_positions[:, :num_tokens].cpu().numpy()
        return positions if positions.shape == (3, num_tokens) else None

    def _find(self, item: MediaItem, ids: Ids, pattern: Ids, lag: int) -> _Image | None:
        """The image, remembered from now on; `None` if another image has the same values, or ids are used up."""
        values = ids[:_NUM_VALUES].copy()
        if not np.array_equal(np.resize(values, len(ids)), ids):
            return None
        key = _key(item, pattern)
        if values.tobytes() not in self._known:
            if self._next_id + len(ids) > _IDS_END:
                return None
            image = _Image(key, self._next_id, len(ids), lag, values)
            self._next_id += len(ids)
            self._known[values.tobytes()] = self._by_first[image.first] = image
            if len(self._known) > _MOST_IMAGES:
                self._forget(self._known.popitem(last=False)[1])
        known = self._known[values.tobytes()]
        self._known.move_to_end(values.tobytes())
        if known is None or known.key == key:
            return known
        # NOTE: the tree cannot distinguish them: its rows for these values may be either's.
        self._known[values.tobytes()] = None
        self._forget(known)
        return None

    def _forget(self, image: _Image | None) -> None:
        if image is not None:
            del self._by_first[image.first]

    def _images(self, tokens: Tokens) -> Iterator[tuple[int, _Image | None]]:
        """The start of each image on a path of core tokens, up to the first forgotten one, which is `None`."""
        places = np.flatnonzero(tokens >= MEDIA_FROM)
        at = 0
        while at < len(places):
            start = int(places[at])
            image = self._by_first.get(int(tokens[start]))
            yield start, image
            if image is None:
                return
            at = int(np.searchsorted(places, start + image.num_tokens))

    def ids(self, tokens: Tokens) -> array[int]:
        """SGLang's ids of a path of core tokens, up to the first forgotten image, whose rows cannot be found."""
        ids = tokens.astype(np.int64)
        for start, image in self._images(tokens):
            if image is None:
                ids = ids[:start]
                break
            ids[start : start + image.num_tokens] = np.resize(image.values, len(ids[start : start + image.num_tokens]))
        return array("q", ids.tobytes())

    def shifts(self, runs: Sequence[Run], media: Media | None) -> list[int]:
        end = max((run.donor_start for run in runs), default=0)
        # NOTE: the prompt's own images may be forgotten by now, those of a resolved donor are not.
        here = Lags([], [0]) if media is None else Lags([end for _, end in media.spans], media.lags)
        there = {path: self.lags(path.tokens(end)) for path in {run.donor for run in runs}}
        return [run.shift - here.at(run.target_start) + there[run.donor].at(run.donor_start) for run in runs]

    def lags(self, tokens: Tokens) -> Lags:
        """The lags of a resolved path."""
        found = [(start + image.num_tokens, image.lag) for start, image in self._images(tokens) if image is not None]
        return Lags([end for end, _ in found], [0, *itertools.accumulate(lag for _, lag in found)])


def make(ctx: BuildContext, drafts: Sequence[nn.Module] = ()) -> TextOnly:
    """`Images` for servers on which moving images was tested; `TextOnly` for others, which compute such requests.

    Args:
        ctx: what SGLang hands over.
        drafts: the draft models, whose keys are rotated by as much as the target's.
    """
    if not ctx.model_config.is_multimodal:
        return TextOnly()
    is_mrope, reason = ctx.model_config.model_is_mrope, always_computed(ctx, Fallback.MEDIA)
    if is_mrope and not all(map(_has_mrope, drafts)):
        reason = "All requests with media are computed: the draft model has no M-RoPE and its target has."
    if reason:
        logger.info("sglang_pic: %s", reason)
        return TextOnly()
    return Images(is_mrope=is_mrope)


def _has_mrope(draft: nn.Module) -> bool:
    """Whether SGLang gives a draft model's layers the positions of M-RoPE, and not the places of tokens."""
    return any(getattr(module, "is_mrope_enabled", False) for module in draft.modules())


def _lag(positions: Ids, span: Span) -> int:
    """The tokens of an image less the positions by which it advances."""
    block = positions[:, slice(*span)]
    return int(span[1] - span[0] - (block.max() - block.min() + 1)) if block.size else 0


def _key(item: MediaItem, pattern: Ids) -> bytes:
    """The digest of an image's whole hash, its positions, and the shapes that the processor gives."""
    details = [(name, _short(value)) for name, value in sorted(item.model_specific_data.items())]
    said = repr((item.hash, item.identity, pattern.shape, details)).encode()
    return hashlib.blake2b(said + np.ascontiguousarray(pattern).tobytes(), digest_size=32).digest()


def _short(value: object) -> object:
    """A grid, a size or a number as plain values; `None` for anything else."""
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist() if value.nbytes <= _MOST_BYTES else None
    return [*map(_short, value)] if isinstance(value, list | tuple) and len(value) <= _MOST_BYTES else None
