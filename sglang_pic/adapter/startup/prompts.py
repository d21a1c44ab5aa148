"""The built-in prompts of the start-up self-test, as token ids of the served model.

Owns the texts and how each becomes token sequences: a prompt, and two donors that hold its blocks. One is the prompt
itself at another position: a splice of it must equal a full prefill, whatever the model is. The other has the blocks
in another order behind another header: how far a splice of it is off says whether the model takes splices. It must
not know how any of them is run.

    prompt    [0, n)   header       | first block  | second block | question, answered by a block
    moved     [p, ...) header       | first block  | second block
    reordered [q, ...) other header | second block | first block
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sglang_pic.core import Path, Plan, ReusePolicy, Run

__all__ = ["Donor", "SelfTestPrompt", "built_in_prompts"]


class Donor(NamedTuple):
    """A sequence that holds blocks of a prompt."""

    tokens: list[int]
    position: int
    """The position of its first token; there is nothing before it."""
    spans: tuple[tuple[int, int, int], ...]
    """`(start, end, donor_start)` of each run: its span of the prompt, and where it begins in `tokens`."""

    def plan(self, num_tokens: int, policy: ReusePolicy, *, max_gaps: int) -> Plan:
        """How a server with this policy serves a prompt of `num_tokens`; no runs where it leaves none."""
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
        # A gap goes before each run, and one behind the last.
        return Plan(prefix_len=0, end=num_tokens, runs=tuple(runs[: max_gaps - 1]))


class SelfTestPrompt(NamedTuple):
    """One prompt and its donors."""

    tokens: list[int]
    moved: Donor
    reordered: Donor


def built_in_prompts(tokenizer: Any | None, *, vocab_size: int, context_len: int) -> list[SelfTestPrompt]:
    """The prompts that fit the model's context.

    Args:
        tokenizer: the served model's; `None` takes seeded token ids in place of the texts.
        vocab_size: ids of the model are in `[0, vocab_size)`.
        context_len: positions of the model are in `[0, context_len)`.
    """
    encode = _seeded(vocab_size) if tokenizer is None else _encoder(tokenizer)
    prompts = (_assemble(text, encode, context_len) for text in _TEXTS)
    return [prompt for prompt in prompts if prompt is not None]


_Encode: TypeAlias = Callable[[str, int, bool], list[int]]


def _seeded(vocab_size: int) -> _Encode:
    draw = np.random.default_rng(0)
    return lambda _text, length, _begins: [int(token) for token in draw.integers(0, vocab_size, length)]


def _encoder(tokenizer: Any) -> _Encode:
    # What the tokenizer puts in front of a prompt (BOS) stands in front of a header only.
    return lambda text, _length, begins: [int(token) for token in tokenizer.encode(text, add_special_tokens=begins)]


def _assemble(text: _Text, encode: _Encode, context_len: int) -> SelfTestPrompt | None:
    header, other = (encode(t, _HEADER_LEN, True)[:_HEADER_LEN] for t in (text.header, text.other_header))
    first, second = (encode(t, _BLOCK_LEN, False)[:_BLOCK_LEN] for t in (text.first, text.second))
    # The end of a question is what is asked.
    question = encode(text.question, _QUESTION_LEN, False)[-_QUESTION_LEN:]
    tokens = [*header, *first, *second, *question]
    room = context_len - max(len(tokens), len(other) + len(first) + len(second))
    if room < 1:
        return None
    middle = len(header) + len(first)
    end = middle + len(second)
    return SelfTestPrompt(
        tokens=tokens,
        # The whole of it is one run: what follows its donor's context follows it here.
        moved=Donor(tokens[:end], min(text.moved_by, room), ((0, end, 0),)),
        reordered=Donor(
            [*other, *second, *first],
            min(text.donor_position, room),
            ((len(header), middle, len(other) + len(second)), (middle, end, len(other))),
        ),
    )


class _Text(NamedTuple):
    header: str
    other_header: str
    first: str
    second: str
    question: str
    moved_by: int
    donor_position: int


# Of a tokenizer with few merges a text is cut here, so that the test stays short; seeded texts are as long.
_HEADER_LEN, _BLOCK_LEN, _QUESTION_LEN = 64, 128, 48

# Written for this test. A header about fills the sink of 32 tokens, a block is about as long as the default minimum
# run, a question ends where one continuation is much likelier than the rest, so that a block which is lost shows.
# Distances are near and far, because a base that is off by little shows far away only.
_TEXTS = (
    _Text(
        "You are the on-call assistant of a small hosting company. Today is Monday the fourth of March, the time is "
        "09:15. Read the notes below and answer briefly.\n\n",
        "Shift handbook, revision twelve, printed for the night team. Session 7f3a. Do not forward these pages outside "
        "of the building without asking first.\n\n",
        "# Note: gateway\nThe gateway accepts traffic on port 8443 and sends it to three workers. When a worker does "
        "not answer within two seconds, the gateway marks it as failed and tries the next one. The log of the gateway "
        "is kept for fourteen days in the folder named ledger. Restarting the gateway takes about forty seconds.\n\n",
        "# Note: backups\nA full backup runs every Sunday at two in the morning and a small one every night at eleven. "
        "Both are written to the machine called Heron, which stands in Oslo. If Heron is full, the oldest backup is "
        "removed first. Lena Fischer owns the backups and has to agree before anything is restored.\n\n",
        "Question: In which city does the machine that holds the backups stand?\nAnswer: The machine that holds the "
        "backups stands in the city of",
        moved_by=37,
        donor_position=0,
    ),
    _Text(
        "# Tools\nThe functions below may be called with JSON arguments. Use one call at a time, wait for its result, "
        "and never invent a function that is not in this list.\n\n",
        "# Reference\nGenerated from the service description on the twelfth of June. Names and types are stable; the "
        "order of the entries in this file is not.\n\n",
        '{"name": "find_order", "description": "Looks an order up by its number", "parameters": {"order_number": '
        '{"type": "string", "description": "Eight digits, as printed on the invoice"}, "with_items": {"type": '
        '"boolean", "description": "Whether the items are listed too"}}, "required": ["order_number"]}\n\n',
        '{"name": "cancel_order", "description": "Cancels an order that has not left the warehouse", "parameters": '
        '{"order_number": {"type": "string", "description": "Eight digits, as printed on the invoice"}, "reason": '
        '{"type": "string", "description": "One sentence for the customer"}}, "required": ["order_number", '
        '"reason"]}\n\n',
        'User: Please list what is in order 40718823.\nCall: {"name": "find_',
        moved_by=1_000,
        donor_position=500,
    ),
    _Text(
        "The following is a walk through an old harbour town, told by a guide to her visitors on a clear afternoon at "
        "the end of the summer season.\n\n",
        "Chapter five of the collected travel letters, with the spelling of the first edition and without the plates "
        "that were lost in the fire.\n\n",
        "The lighthouse was built of grey granite by the widow of a captain, who wanted no other ship to be lost on "
        "the rocks where his had broken. It took nine winters. The lamp burned whale oil at first, then gas, and has "
        "turned by electricity for seventy years. Its keeper still climbs the two hundred steps every evening.\n\n",
        "Behind the fish market stands a bakery with a blue door. The baker, a quiet man called Anselm, came here from "
        "the mountains and bakes a dark bread with walnuts that the sailors take along, because it stays fresh for ten "
        "days. On feast days he gives a small loaf to every child who can sing him a song.\n\n",
        "We stopped in front of the bakery with the blue door, and the guide said that the name of the baker was",
        moved_by=6_000,
        donor_position=3_000,
    ),
)
