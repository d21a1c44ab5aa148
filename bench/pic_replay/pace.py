"""When sessions start and how long they pause between calls, by a seed: the same in a replay and in simulated time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from pic_traces.session import Session


class Pace(NamedTuple):
    """Sessions that start at random moments of a span: Poisson arrivals of a known number."""

    spread_s: float
    """Sessions start in `[0, spread_s)`."""
    pause_s: float
    """Mean of the exponential pause between the end of a call and the session's next one."""
    seed: int = 1

    def times(self, session: Session) -> Iterator[float]:
        """Seconds from the beginning to the session's first call, then the pause before each further call.

        They depend on the seed and on the session's id alone.
        """
        rng = random.Random(f"pace {self.seed} {session.session_id}")
        yield rng.uniform(0.0, self.spread_s)
        for _ in range(session.num_calls - 1):
            yield rng.expovariate(1 / self.pause_s) if self.pause_s else 0.0
