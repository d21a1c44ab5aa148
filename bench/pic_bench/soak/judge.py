"""Compares answers of `off` requests with those of a stock server, while the soak goes on.

Both compute in float32, but in other batches, so sums are rounded differently: log-probabilities may differ by
`TOLERANCE`, and a greedy answer may go on with another token only where the stock server's two differ by no more than
rounding can turn round. One wrong row among hundreds moves them further: `control` shows it.
"""

from __future__ import annotations

import math
import queue
import random
import threading
from typing import Any

from pic_bench.compare.server import Server
from pic_bench.soak.load import Request

TOLERANCE = 2e-4
_MAX_WAITING = 24
_STOP = None


class Judge:
    """One thread that asks the stock server, in order."""

    def __init__(self, stock: Server) -> None:
        self._stock = stock
        self._waiting: queue.Queue[tuple[Request, dict[str, Any]] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)
        self.num_compared = 0
        self.num_ties = 0
        """Answers that went on with another token, where the two were equally likely but for rounding."""
        self.largest = 0.0
        """Difference of two log-probabilities in answers that agree."""
        self.mismatches: list[str] = []

    def __enter__(self) -> Judge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Wait for what is left to compare. Safe to call twice."""
        if self._thread.is_alive():
            self._waiting.put(_STOP)
            self._thread.join()

    def consider(self, request: Request, answer: dict[str, Any]) -> None:
        """Compare an answer, unless as many wait already as the stock server can serve."""
        try:
            self._waiting.put_nowait((request, answer))
        except queue.Full:
            return

    def control(self, request: Request, seed: int) -> bool:
        """Whether an answer to a prompt with one other token in it is told from the right one."""
        rng = random.Random(seed)
        other = list(request.prompt)
        place = rng.randrange(len(other) // 4, len(other) // 2)
        other[place] = (other[place] + rng.randrange(1, 1000)) % 40_000 + 1000
        right, wrong = self._ask(request), self._ask(request._replace(prompt=other))
        return compare(right, wrong)[0] is not None

    def _run(self) -> None:
        while (item := self._waiting.get()) is not _STOP:
            request, answer = item
            try:
                difference, largest, is_tie = compare(self._ask(request), answer)
            except Exception as error:
                difference, largest, is_tie = f"not compared: {error}", 0.0, False
            self.num_compared += 1
            self.num_ties += is_tie
            if difference is None:
                self.largest = max(self.largest, largest)
            else:
                self.mismatches.append(f"{request.rid}: {difference}")

    def _ask(self, request: Request) -> dict[str, Any]:
        return dict(self._stock.post("/generate", request._replace(pic=None).body))


def compare(stock: dict[str, Any], answer: dict[str, Any]) -> tuple[str | None, float, bool]:
    """What differs by more than rounding, if anything; the largest difference otherwise; whether a tie ended it."""
    largest = 0.0
    tokens = [[entry[1] for entry in each["meta_info"]["output_token_logprobs"]] for each in (stock, answer)]
    if len(tokens[0]) != len(tokens[1]):
        return f"{len(tokens[1])} tokens, stock has {len(tokens[0])}", largest, False
    tops = [
        [{entry[1]: entry[0] for entry in place} for place in each["meta_info"]["output_top_logprobs"]]
        for each in (stock, answer)
    ]
    for place, (right, found) in enumerate(zip(*tops, strict=True)):
        # A token that only one of them has among its likeliest is at most as likely as the last one of the other.
        floors = min(right.values()), min(found.values())
        for token in right.keys() | found.keys():
            difference = abs(right.get(token, floors[0]) - found.get(token, floors[1]))
            if not difference <= TOLERANCE:
                return f"token {place}: log-probability of {token} off by {difference:.2e}", largest, False
            largest = max(largest, difference)
        right_token, found_token = tokens[0][place], tokens[1][place]
        if right_token != found_token:
            gap = right[right_token] - right.get(found_token, -math.inf)
            if not gap <= 2 * TOLERANCE:
                return f"token {place}: {found_token} instead of {right_token}, {gap:.2e} likelier", largest, False
            return None, largest, True
    return None, largest, False
