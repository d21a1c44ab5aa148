"""The raw record of one measured request, and files of records: one record a line, packed by gzip or not."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TypeVar

import msgspec
from pic_replay.packed import is_written, read_written

from sglang_pic.errors import BenchError

T = TypeVar("T")
MIN_GAP = 0.5
"""Of EDITS, in nats of log-odds between the two full prefills; where they differ by less, the model does not use the
field, and there is nothing to recover."""

SURE = 0.9
"""Probability beyond which the choice of a token is made: keys of JSON, copied ids, names of tools."""


class Experiment(Enum):
    """The variable of the experiment."""

    TRACE = "trace"  # the calls of a trace in order, under policies
    EDITS = "edits"  # a prompt behind the same prompt with other values in its fields


class Donors(Enum):
    """Where a run's rows were computed."""

    NONE = "none"  # nothing is spliced: a control
    CONTEXT = "context"  # in one request with the other blocks, in another order
    TRACE = "trace"  # wherever earlier calls of the trace computed them
    EDITED = "edited"  # in the same prompt with other values in its fields


class TemplateSet(Enum):
    """Sets of templates of EDITS; no template is in both, and none was used to find the rule of changed fields."""

    REPORT = "report"
    WORDS = "words"  # for models that can draw conclusions: said in other words, in short prompts


class Family(Enum):
    """How the answer to a prompt of EDITS depends on the field."""

    DIRECTORY = "directory"  # a line elsewhere says what belongs to the value
    CHAIN = "chain"  # two such lines, one after the other
    OVERWRITE = "overwrite"  # the field is a later setting of a key that was set before
    THRESHOLD = "threshold"  # the answer depends on which side of a limit the value lies
    NEGATION = "negation"  # the values are a statement and its denial
    PARAPHRASE = "paraphrase"  # lines elsewhere say it in words that stand neither in the field nor in its label
    JSON = "json"  # the field stands in a state object, the rule in prose or in another object
    IRRELEVANT = "irrelevant"  # the answer does not depend on the field
    CLOCK = "clock"  # the field is a time, a counter or an id that nothing else mentions

    @property
    def is_gated(self) -> bool:
        """Whether the answer is meant to change with the field."""
        return self not in (Family.IRRELEVANT, Family.CLOCK)


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt of EDITS differs from the one that was served before it."""

    template: str
    family: Family
    distance: int
    """Tokens of filler between the fields and the first line that draws on one; about."""
    old_tokens: int
    """The difference of the field that the question is about."""
    new_tokens: int
    num_fields: int


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt under one arm. Divergences are KL(full prefill || this) in nats over the whole vocabulary.

    Earlier records have fields of experiments that are gone.
    """

    schema_version: int = 1
    experiment: Experiment
    dtype: str
    """SGLang's name: `float32`, `bfloat16`."""
    prompt: str
    """Identifies the prompt within its experiment; the same under every arm."""
    source: str
    arm: str
    """`full`, `retest` (full prefill again), `exact` (exact prefix hit), `naive` (spliced, not rotated), `stale` (what
    the old prompt answers), or a policy's name."""
    donors: Donors
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
    edit: Edit | None = None
    """In EDITS."""
    log_odds: float | None = None
    """In EDITS, where the answer is meant to change: logit of the new answer less logit of the old one."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the model prefilled."""
        return self.prompt_tokens - self.prefix_hit_tokens - self.chunk_hit_tokens

    def uses_no_field(self, stale: Probe) -> bool:
        """Of EDITS: whether this full prefill and the old prompt's differ too little for anything to be recovered.

        Never where the answer is not meant to change.
        """
        return self.log_odds is not None and stale.log_odds is not None and self.log_odds - stale.log_odds < MIN_GAP

    @property
    def unit(self) -> str:
        """The unit that intervals draw: records that share text, and so resemble each other, have the same unit.

        A trace's session, in whatever order it is served; of edits, the template.
        """
        return self.prompt.rpartition("/")[2].rpartition("-")[0] if self.edit is None else self.edit.template


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt that was not served as meant, and so is in no record."""

    schema_version: int = 1
    experiment: Experiment
    dtype: str
    prompt: str
    reason: str


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
