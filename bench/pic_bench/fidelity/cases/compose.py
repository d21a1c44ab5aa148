"""The experiment COMPOSE: skills compiled once behind the system prompt, then put together in other orders.

    alone      system | skill | closing                       one request a skill
    together   system | skill | skill | ... | closing         one request a library
    composed   system | skill | skill | ... | question        the skills in another order

Nothing parts the skills: where two stand as they were compiled together, they are one run. The system prompt is an
exact prefix hit in every arm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, groupby, pairwise

import msgspec

from pic_bench.fidelity.arms import EXACT, FULL, Arm
from pic_bench.fidelity.cases.case import Case, FrameWords, Ids, Job, Span, words
from pic_bench.fidelity.cases.text import ModelText, TextPool
from pic_bench.fidelity.config import Sizes
from pic_bench.fidelity.record import Donors, Experiment
from sglang_pic.errors import ConfigError

SEAMS = (0, 1, 32)
ORDERS_PER_LIBRARY = 6
_ROOM = 256  # system prompt, question and the generated token
_QUOTE_TOKENS = 12


class _Words(msgspec.Struct, frozen=True):
    system: str
    compiled: str
    questions: list[str]


_WORDS = words("skills", _Words)
_NAMES = words("passages", FrameWords).donor_markers


class Library:
    """Some skills, and the requests that compile them."""

    def __init__(self, name: str, sizes: Sizes, num_skills: int, text: ModelText, pool: TextPool, seed: int) -> None:
        self.name, self._text = name, text
        rng = random.Random(f"{name}-{seed}")
        self.names = rng.sample(_NAMES, num_skills)
        # A run grows while tokens are equal: what may stand behind a skill begins with another token than a skill.
        heads, end = [text.ids(f"## Skill {name}\n") for name in self.names], text.ids("\n\n")
        bodies = pool.cut(rng, [rng.randint(*sizes.skill_tokens) - len(head) - len(end) for head in heads])
        self.skills: list[Ids] = [head + body + end for head, body in zip(heads, bodies, strict=True)]
        self._source = pool.source
        header, closing = text.around(_WORDS.system, "", _WORDS.compiled)
        self.donors = {Donors.ISOLATED: tuple(header + skill + closing for skill in self.skills)}
        # A library of one skill is that skill alone.
        if num_skills > 1:
            self.donors[Donors.CONTEXT] = ([*header, *chain(*self.skills), *closing],)

    def case(self, order: Sequence[int], place: int, seed: int) -> Case:
        """The skills in an order, with a question about one of them."""
        rng = random.Random(f"{self.name}-{place}-{seed}")
        asked = rng.randrange(len(order))
        quote = self._text.text(self.skills[asked][-_QUOTE_TOKENS:]).strip()
        question = rng.choice(_WORDS.questions).format(name=self.names[asked], quote=quote)
        header, closing = self._text.around(_WORDS.system, "", question)
        edges = pairwise(accumulate((len(self.skills[i]) for i in order), initial=len(header)))
        return Case(
            experiment=Experiment.COMPOSE,
            name=f"{self.name}-{place}",
            source=self._source,
            prompt=[*header, *chain(*(self.skills[i] for i in order)), *closing],
            gold=[],
            blocks=tuple(Span(start, end) for start, end in edges),
            donors=self.donors,
            library=self.name,
            warm_len=len(header),
        )


def compose_jobs(sizes: Sizes, text: ModelText, pool: TextPool, seed: int) -> Iterator[Job]:
    """As many prompts of each number of skills that the model's context has room for.

    Raises:
        ConfigError: there is room for none.
    """
    fitting = [count for count in sizes.skills if count * sizes.skill_tokens[1] + _ROOM <= text.context_len]
    if not fitting:
        raise ConfigError(
            f"skills={list(sizes.skills)!r}: at {sizes.skill_tokens[1]} tokens each none of these numbers fits into "
            f"the model's context of {text.context_len} tokens; give fewer or shorter skills."
        )
    # An interrupted run has as many of each number; prompts of one library are served while its rows are there.
    for first in range(0, sizes.compositions, ORDERS_PER_LIBRARY):
        for count in fitting:
            numbers = range(first, min(first + ORDERS_PER_LIBRARY, sizes.compositions))
            yield from _jobs(numbers, count, sizes, text, pool, seed)


def other_orders(count: int, wanted: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Up to `wanted` different orders of `count` things, without the one from 0 on where there is another."""
    own = tuple(range(count))
    found: dict[tuple[int, ...], None] = {}
    while len(found) < min(wanted, math.factorial(count) - 1):
        order = tuple(rng.sample(own, count))
        if order != own:
            found[order] = None
    return list(found) or [own]


def _jobs(numbers: range, num_skills: int, sizes: Sizes, text: ModelText, pool: TextPool, seed: int) -> Iterator[Job]:
    """Of libraries with fewer orders there are more."""
    per_library = min(ORDERS_PER_LIBRARY, max(1, math.factorial(num_skills) - 1))
    for which, of_library in groupby(numbers, lambda number: number // per_library):
        library = Library(f"compose-{num_skills}-{which}", sizes, num_skills, text, pool, seed)
        orders = other_orders(num_skills, per_library, random.Random(f"{library.name}-{seed}"))
        arms = [msgspec.structs.replace(_arm(seam), donors=kind) for kind in library.donors for seam in SEAMS]
        for place in (number % per_library for number in of_library):
            yield Job(case=library.case(orders[place], place, seed), arms=(FULL, EXACT, *arms))


def _arm(seam_tokens: int) -> Arm:
    """Skills are spliced near the prompt's end too; all else is the server's."""
    return Arm(name=f"seam-{seam_tokens}", overrides={"seam_tokens": seam_tokens}, options={"skills": "near"})
