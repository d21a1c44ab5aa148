"""Prompts put together from pieces of token ids, so that a block has the same ids wherever it stands.

    prompt   header | marker block | marker block | ... | tail       the tail is computed, gold follows it
    donor    header | marker foreign | marker block | ... | closing   one request, blocks in another order

Markers, headers and closings differ between prompt and donors in the tokens that touch a block, so that a run is the
block exactly and every block has a seam of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from sglang_pic.errors import BenchError

# The attention sink is 32 tokens by default: rows below it are neither donors nor spliced.
MIN_HEADER = 40

Ids = list[int]
T = TypeVar("T")


class Span(NamedTuple):
    """Tokens `[start, end)` of a prompt."""

    start: int
    end: int


class Tokens(NamedTuple):
    """The first tokens by which two answers differ."""

    old: int
    new: int


class Family(Enum):
    """How the answer to a prompt of `edits` depends on the field."""

    DIRECTORY = "directory"  # a line elsewhere says what belongs to the value
    CHAIN = "chain"  # two such lines, one after the other
    OVERWRITE = "overwrite"  # the field is a later setting of a key that was set before
    THRESHOLD = "threshold"  # the answer depends on which side of a limit the value lies
    NEGATION = "negation"  # the values are a statement and its denial
    PARAPHRASE = "paraphrase"  # lines elsewhere say it in words that stand neither in the field nor in its label
    JSON = "json"  # the field stands in a state object, the rule in prose or in another object


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """How a prompt differs from the one that is served before it, whose rows are its donors; it ends where the two
    answers part."""

    old: Ids
    answers: Tokens
    family: Family


class FrameWords(msgspec.Struct, frozen=True):
    """The words of a prompt's frame and of its donors'."""

    markers: list[str]
    donor_markers: list[str]
    header: str
    donor_header: str


_WORDS = msgspec.toml.decode(Path(__file__).with_name("words.toml").read_bytes())


def words(section: str, kind: type[T]) -> T:
    """A section of words.toml."""
    return msgspec.convert(_WORDS[section], kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The text around the blocks of one kind of request."""

    header: Ids
    markers: Sequence[Ids]
    """One for each place, in order; a prompt may have fewer blocks."""
    closing: Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt, and the requests before it whose rows it may take."""

    name: str
    """Unique among the prompts of a source; letters, digits and `-`."""
    source: str
    prompt: Ids
    gold: Ids
    """What is forced after the prompt."""
    donor: Ids | None = None
    """Of a task: one request with most of its text at other places."""
    edited: Edited | None = None
    """Of a prompt of `edits`."""
    judge: Callable[[str, str], bool] | None = None
    """Of a task: whether an answer is right, given it and the full prefill's."""
    answer_tokens: int = 0
    """Of a task, the most that an answer may have."""


def place_blocks(
    target: Frame, donor: Frame, blocks: Sequence[Ids], foreign: Ids, rng: random.Random
) -> tuple[Ids, Ids]:
    """A prompt with blocks, and one request that computes them, away from where they stand in the prompt.

    Args:
        target: the prompt's frame; its closing is the tail.
        donor: the donor's frame; it has one marker more than there are blocks, for the foreign text.
        foreign: stands before the donor's blocks, so that a single block has a context too.

    Raises:
        BenchError: a block would grow beyond its ends, or would not move.
    """
    prompt, spans = lay_out(target, blocks)
    # None keeps its place, unless it is alone.
    order = list(range(len(blocks)))
    while len(blocks) > 1 and any(i == place for place, i in enumerate(order)):
        rng.shuffle(order)
    context, (_, *moved) = lay_out(donor, [foreign, *(blocks[i] for i in order)])
    for i, there in zip(order, moved, strict=True):
        _check_edges(prompt, spans[i], context, there)
    return prompt, context


def lay_out(frame: Frame, blocks: Sequence[Ids]) -> tuple[Ids, tuple[Span, ...]]:
    """A frame with blocks in it, and where they are.

    Raises:
        BenchError: the header is shorter than a sink, or there are more blocks than markers.
    """
    if len(frame.header) < MIN_HEADER:
        raise BenchError(f"a header of {len(frame.header)} tokens leaves blocks in the sink: {MIN_HEADER} are needed.")
    if len(frame.markers) < len(blocks):
        raise BenchError(f"{len(blocks)} blocks, but only {len(frame.markers)} markers.")
    ids = list(frame.header)
    spans = []
    for marker, block in zip(frame.markers, blocks, strict=False):
        ids += marker
        spans.append(Span(len(ids), len(ids) + len(block)))
        ids += block
    return ids + list(frame.closing), tuple(spans)


def _check_edges(prompt: Ids, span: Span, donor: Ids, there: Span) -> None:
    """A block must move, and end where it is meant to: a run grows while tokens are equal."""
    if span.start == there.start:
        raise BenchError("a block stands where its donor stands: the headers must differ in length.")
    if prompt[span.start - 1] == donor[there.start - 1]:
        raise BenchError("prompt and donor have the same token before a block: choose other markers.")
    if there.end < len(donor) and prompt[span.end] == donor[there.end]:
        raise BenchError("prompt and donor have the same token after a block: choose other markers.")
