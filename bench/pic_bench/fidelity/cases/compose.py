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
from itertools import accumulate, chain, groupby, pairwise, product
from operator import itemgetter

import msgspec

from pic_bench.fidelity.arms import EXACT, FULL, Arm
from pic_bench.fidelity.cases.case import Case, FrameWords, Job, Span, words
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
    for first, count in product(range(0, sizes.compositions, ORDERS_PER_LIBRARY), fitting):
        # Of libraries with fewer orders there are more.
        num_orders = min(ORDERS_PER_LIBRARY, max(1, math.factorial(count) - 1))
        numbers = range(first, min(first + ORDERS_PER_LIBRARY, sizes.compositions))
        for which, some in groupby((divmod(number, num_orders) for number in numbers), itemgetter(0)):
            places = [place for _, place in some]
            yield from _library(f"compose-{count}-{which}", places, count, sizes, text, pool, seed)


def _other_orders(count: int, wanted: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Up to `wanted` different orders of `count` things, without the one from 0 on where there is another."""
    own = tuple(range(count))
    found: dict[tuple[int, ...], None] = {}
    while len(found) < min(wanted, math.factorial(count) - 1):
        order = tuple(rng.sample(own, count))
        if order != own:
            found[order] = None
    return list(found) or [own]


def _library(
    name: str, places: Sequence[int], num_skills: int, sizes: Sizes, text: ModelText, pool: TextPool, seed: int
) -> Iterator[Job]:
    """Some skills, the requests that compile them, and prompts that have them in other orders."""
    rng = random.Random(f"{name}-{seed}")
    names = rng.sample(_NAMES, num_skills)
    # A run grows while tokens are equal: what may stand behind a skill begins with another token than a skill.
    heads, end = [text.ids(f"## Skill {name}\n") for name in names], text.ids("\n\n")
    bodies = pool.cut(rng, [rng.randint(*sizes.skill_tokens) - len(head) - len(end) for head in heads])
    skills = [head + body + end for head, body in zip(heads, bodies, strict=True)]
    header, closing = text.around(_WORDS.system, "", _WORDS.compiled)
    donors = {Donors.ISOLATED: tuple(header + skill + closing for skill in skills)}
    # A library of one skill is that skill alone.
    if num_skills > 1:
        donors[Donors.CONTEXT] = ([*header, *chain(*skills), *closing],)
    arms = [msgspec.structs.replace(_arm(seam), donors=kind) for kind in donors for seam in SEAMS]
    orders = _other_orders(num_skills, ORDERS_PER_LIBRARY, random.Random(f"{name}-{seed}"))
    for place in places:
        rng, order = random.Random(f"{name}-{place}-{seed}"), orders[place]
        asked = rng.randrange(num_skills)
        quote = text.text(skills[asked][-_QUOTE_TOKENS:]).strip()
        question = rng.choice(_WORDS.questions).format(name=names[asked], quote=quote)
        header, closing = text.around(_WORDS.system, "", question)
        edges = pairwise(accumulate((len(skills[i]) for i in order), initial=len(header)))
        case = Case(
            experiment=Experiment.COMPOSE,
            name=f"{name}-{place}",
            source=pool.source,
            prompt=[*header, *chain(*(skills[i] for i in order)), *closing],
            gold=[],
            blocks=tuple(Span(start, end) for start, end in edges),
            donors=donors,
            library=name,
            warm_len=len(header),
        )
        yield Job(case=case, arms=(FULL, EXACT, *arms))


def _arm(seam_tokens: int) -> Arm:
    """Skills are spliced near the prompt's end too; all else is the server's."""
    return Arm(name=f"seam-{seam_tokens}", overrides={"seam_tokens": seam_tokens}, options={"skills": "near"})
