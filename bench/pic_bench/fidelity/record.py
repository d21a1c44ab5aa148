"""The raw record of one measured request, and files of records: one record a line, packed by gzip or not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from pic_replay.packed import is_written, read_written

from sglang_pic.errors import BenchError

T = TypeVar("T")
SURE = 0.9
"""Probability beyond which the choice of a token is made: keys of JSON, copied ids, names of tools."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a trace under one arm. Divergences are KL(full prefill || this) in nats over the whole vocabulary.

    Earlier records have more fields.
    """

    schema_version: int = 1
    experiment: Literal["trace"] = "trace"
    """The records of others are of another version."""
    dtype: str
    """SGLang's name: `float32`, `bfloat16`."""
    prompt: str
    """Identifies the call within its source; the same under every arm."""
    source: str
    arm: str
    """`full`, `retest` (full prefill again), `exact` (exact prefix hit), `naive` (spliced, not rotated), or a policy's
    name."""
    prompt_tokens: int
    prefix_hit_tokens: int
    chunk_hit_tokens: int
    top1_probability: float
    """Of the full prefill's likeliest token, in the full prefill: how decided the model is here."""
    kl: float
    """Of the first token."""
    cosine: float
    """Of the first token's logits, each centred on its mean."""
    top1_agrees: bool
    """Whether the likeliest first token is the full prefill's."""
    forced_kl: float | None = None
    """Mean over the positions of the gold continuation, each given the gold tokens before it."""
    forced_agreement: float | None = None
    """Share of these positions whose likeliest token is the full prefill's."""
    sure_tokens: int | None = None
    """Positions of these at which the full prefill is sure: its likeliest token has more than `SURE`."""
    sure_flips: int | None = None
    """How many of them have another likeliest token here."""
    gold_tokens: int = 0
    gold_nll: float | None = None
    """Mean negative log-likelihood of the gold continuation's tokens; perplexity is its exponential."""
    text: str | None = None
    """The end of the prompt and both answers, for the list of the worst."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the model prefilled."""
        return self.prompt_tokens - self.prefix_hit_tokens - self.chunk_hit_tokens

    @property
    def unit(self) -> str:
        """The session, in whatever order it is served: intervals draw sessions, whose calls resemble each other."""
        return self.prompt.rpartition("/")[2].rpartition("-")[0]


def append_lines(path: Path, records: Iterable[msgspec.Struct]) -> None:
    """Append records to a file; each is one line, so that an interrupted run keeps what it measured."""
    with path.open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """All records of a file; a last line that was cut off is left out, and no file has none.

    Raises:
        BenchError: the file cannot be read or unpacked, or a line is no such record.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        return [decoder.decode(line) for line in whole_lines(path).split(b"\n") if line]
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{path}: no records that this version can read ({error}).") from error


def whole_lines(path: Path) -> bytes:
    """A file without a last line that was cut off, packed by gzip or not; nothing where there is no file.

    Raises:
        OSError: the file cannot be read or unpacked.
    """
    data = read_written(path) if is_written(path) else b""
    return data[: data.rfind(b"\n") + 1]
