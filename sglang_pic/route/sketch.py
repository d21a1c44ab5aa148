"""Sketches: salted names of some chunks of a server, or of a prompt.

One chunk in `SAMPLE_EVERY` is sampled, chosen by its name, so servers and prompts choose the same ones. A name is
hashed again with a secret key and its namespace: without the key it reveals no text, and equal text of two namespaces
has different names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_pic.core import Chunker, CoreConfig, Tokens
from sglang_pic.core.token_loops import ENDING_LEN

SAMPLE_EVERY: Final = 4
"""One chunk in so many is sampled: with chunks of 16 tokens one in 64 tokens."""

Names = npt.NDArray[np.uint64]
"""Names of chunks: `[num_chunks]`."""

_NAME_BYTES = 8


class Sketched(NamedTuple):
    """The sampled chunks of a prompt."""

    names: Names
    """The salted name of each, in the order of the prompt."""
    ends: npt.NDArray[np.int64]
    """End of the tokens that each represents, which begin where the one before ends: `[num_chunks]`."""
    num_tokens: int
    """Length of the prompt."""


def salted(names: Sequence[int] | Names, namespace: bytes, salt: bytes) -> Names:
    """The salted names of the sampled chunks, in their order; a keyed BLAKE2b of each, about .3 us.

    Args:
        names: the names of a namespace's chunks.
        namespace: the canonical bytes of the namespace.
        salt: the secret that servers and router share, up to 64 bytes.
    """
    plain = np.asarray(names, dtype=np.uint64)
    return _salt(plain[_is_sampled(plain)], namespace, salt)


def cut(
    tokens: Tokens,
    namespace: bytes,
    salt: bytes,
    *,
    chunker: Chunker | None = None,
    delimiters: frozenset[int] = frozenset(),
) -> Sketched:
    """The sketch of a prompt, cut as servers cut what they publish. Cost O(tokens), about 50 ns each.

    Args:
        tokens: the prompt.
        namespace: the canonical bytes of its namespace.
        salt: the secret that servers and router share.
        chunker: as on the servers; the default settings by default.
        delimiters: ids of tokens that open or close a message, as on the servers.
    """
    config = CoreConfig()
    chunker = chunker or Chunker(config)
    ends = chunker.cut(tokens, delimiters=delimiters)
    names = np.array(chunker.names(tokens, [0, *ends[:-1]], ends), dtype=np.uint64)
    bounds = np.array([0, *ends], dtype=np.int64)
    # NOTE: shorter chunks, such as delimiters, and those of the sink are no donors on servers.
    is_donor = np.diff(np.maximum(bounds, config.sink_tokens)) >= ENDING_LEN
    sampled = np.flatnonzero(_is_sampled(names) & is_donor)
    # Half of the tokens between two sampled chunks belongs to each.
    middles = (bounds[sampled + 1] + np.append(bounds[sampled[1:]], bounds[sampled[-1:] + 1])) // 2
    middles[-1:] = len(tokens)
    return Sketched(_salt(names[sampled], namespace, salt), middles, len(tokens))


def _is_sampled(names: Names) -> npt.NDArray[np.bool_]:
    return names % np.uint64(SAMPLE_EVERY) == 0


def _salt(names: Names, namespace: bytes, salt: bytes) -> Names:
    key = hashlib.blake2b(namespace, digest_size=32, key=salt).digest()
    # The key is hashed once.
    keyed = hashlib.blake2b(key=key, digest_size=_NAME_BYTES)
    raw = names.astype("<u8").tobytes()
    digests = []
    for at in range(0, len(raw), _NAME_BYTES):
        each = keyed.copy()
        each.update(raw[at : at + _NAME_BYTES])
        digests.append(each.digest())
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
