"""The built-in prompts of the start-up self-test, as token ids of the served model.

Each text of `prompts.toml` becomes a prompt and two donors with its blocks. One donor is the prompt itself at another
position: a splice of it must equal a full prefill with any model. The other donor has the blocks in another order after
another header: its error shows how well the model tolerates splices.

    prompt    [0, n)   header       | first block  | second block | question, answered by a block
    moved     [p, ...) header       | first block  | second block | question
    reordered [q, ...) other header | second block | first block
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from sglang_pic.adapter.startup.tokenizer import Tokenizer
from sglang_pic.core import Path, Plan, ReusePolicy, Run


class Donor(NamedTuple):
    """A sequence with blocks of a prompt."""

    tokens: list[int]
    position: int
    """The position of its first token; there is nothing before it."""
    spans: tuple[tuple[int, int, int], ...]
    """`(start, end, donor_start)` of each run: its span of the prompt, and its start in `tokens`."""

    def plan(self, num_tokens: int, policy: ReusePolicy, *, max_gaps: int) -> Plan:
        """The plan of a server with this policy for a prompt of `num_tokens`; it may have no runs."""
        path = Path("self-test", [np.zeros(self.position, np.int32), np.array(self.tokens, np.int32)])
        runs = []
        for start, end, donor_start in self.spans:
            skip = max(policy.seam_tokens, policy.sink_tokens - start, policy.sink_tokens - donor_start)
            if start + skip < end:
                runs.append(
                    Run(
                        target_start=start + skip,
                        target_end=end,
                        donor_start=self.position + donor_start + skip,
                        donor=path,
                        seam_len=min(policy.seam_tokens, skip),
                    )
                )
        # There is a gap before each run, and one after the last.
        return Plan(prefix_len=0, end=num_tokens, runs=tuple(runs[: max_gaps - 1]))


class SelfTestPrompt(NamedTuple):
    """One prompt and its donors."""

    tokens: list[int]
    moved: Donor
    reordered: Donor


def built_in_prompts(tokenizer: Tokenizer | None, *, vocab_size: int, context_len: int) -> list[SelfTestPrompt]:
    """The prompts that fit the model's context.

    Args:
        tokenizer: the served model's; `None` for seeded token ids instead of texts.
        vocab_size: ids of the model are in `[0, vocab_size)`.
        context_len: positions of the model are in `[0, context_len)`.
    """
    encode = _seeded(vocab_size) if tokenizer is None else _encoder(tokenizer)
    prompts = (_assemble(text, encode, context_len) for text in _texts())
    return [prompt for prompt in prompts if prompt is not None]


_Encode: TypeAlias = Callable[[str, int, bool], list[int]]
"""`encode(text, length, begins)`: ids of a text, or `length` ids; with `begins` after BOS, if there is one."""


def _seeded(vocab_size: int) -> _Encode:
    draw = np.random.default_rng(0)
    return lambda _text, length, _begins: [int(token) for token in draw.integers(0, vocab_size, length)]


def _encoder(tokenizer: Tokenizer) -> _Encode:
    return lambda text, _length, begins: [int(token) for token in tokenizer.encode(text, add_special_tokens=begins)]


def _assemble(text: _Text, encode: _Encode, context_len: int) -> SelfTestPrompt | None:
    header, other = (encode(t, _HEADER_LEN, True)[:_HEADER_LEN] for t in (text.header, text.other_header))
    first, second = (encode(t, _BLOCK_LEN, False)[:_BLOCK_LEN] for t in (text.first, text.second))
    # The end of the question matters, so its beginning is cut.
    question = encode(text.question, _QUESTION_LEN, False)[-_QUESTION_LEN:]
    tokens = [*header, *first, *second, *question]
    room = context_len - max(len(tokens), len(other) + len(first) + len(second))
    if room < 1:
        return None
    middle = len(header) + len(first)
    end = middle + len(second)
    return SelfTestPrompt(
        tokens=tokens,
        # One run, because the donor's blocks have the same context as the prompt's.
        moved=Donor(tokens, min(text.moved_by, room), ((0, end, 0),)),
        reordered=Donor(
            [*other, *second, *first],
            min(text.donor_position, room),
            ((len(header), middle, len(other) + len(second)), (middle, end, len(other))),
        ),
    )


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    header: str
    other_header: str
    first: str
    second: str
    question: str
    moved_by: int
    donor_position: int


@cache
def _texts() -> list[_Text]:
    content = resources.files(__package__).joinpath("prompts.toml").read_bytes()
    return msgspec.toml.decode(content, type=dict[str, list[_Text]])["prompts"]


# Texts are cut to these lengths, because a tokenizer with few merges gives many ids; seeded texts have them too.
_HEADER_LEN, _BLOCK_LEN, _QUESTION_LEN = 64, 128, 48
