"""Compares answers of `off` requests with those of a stock server, each as soon as it is there.

Both compute in float32, but in other batches, so sums are rounded differently: log-probabilities may differ by
`TOLERANCE`, and a greedy answer may go on with another token only where the stock server's two differ by no more than
rounding can turn round. One wrong row among hundreds moves them further: `control` shows it.
"""

from __future__ import annotations

import math
import random
from typing import Any

from pic_bench.compare.server import Server
from pic_bench.soak.load import Request
from sglang_pic.errors import BenchError

TOLERANCE = 2e-4


class Judge:
    """Asks the stock server for what clients of the other one were answered; safe to call from several threads."""

    def __init__(self, stock: Server) -> None:
        self._stock = stock
        self.verdicts: list[str | None] = []
        """Of every compared answer, what differs."""

    def compare(self, request: Request, answer: dict[str, Any]) -> None:
        """Have the stock server answer the same, and note what differs by more than rounding."""
        try:
            found = difference(self._ask(request), answer)
        except (BenchError, OSError) as error:
            found = f"not compared: {error}"
        self.verdicts.append(None if found is None else f"{request.rid}: {found}")

    def control(self, request: Request, seed: int) -> bool:
        """Whether an answer to a prompt with one other token in it is told from the right one."""
        rng = random.Random(seed)
        other = list(request.prompt)
        place = rng.randrange(len(other) // 4, len(other) // 2)
        other[place] = (other[place] + rng.randrange(1, 1000)) % 40_000 + 1000
        right, wrong = self._ask(request), self._ask(request._replace(prompt=other))
        return difference(right, wrong) is not None

    def _ask(self, request: Request) -> dict[str, Any]:
        return dict(self._stock.post("/generate", request._replace(pic=None).body))


def difference(stock: dict[str, Any], answer: dict[str, Any]) -> str | None:
    """What of an answer differs from the stock server's by more than rounding."""
    pair = _places(stock), _places(answer)
    if len(pair[0]) != len(pair[1]):
        return f"{len(pair[1])} tokens, stock has {len(pair[0])}"
    for place, ((right_token, right), (found_token, found)) in enumerate(zip(*pair, strict=True)):
        # A token that only one of them has among its likeliest is at most as likely as the last one of the other.
        floors = min(right.values()), min(found.values())
        for token in right.keys() | found.keys():
            apart = abs(right.get(token, floors[0]) - found.get(token, floors[1]))
            if not apart <= TOLERANCE:
                return f"token {place}: log-probability of {token} off by {apart:.2e}"
        if right_token != found_token:
            gap = right[right_token] - right.get(found_token, -math.inf)
            # Behind a tie, which rounding decides, the two go on with other tokens: no more can be compared.
            return None if gap <= 2 * TOLERANCE else f"token {place}: {found_token} instead of {right_token}"
    return None


def _places(answer: dict[str, Any]) -> list[tuple[int, dict[int, float]]]:
    """The chosen token of every place, and the log-probabilities of the likeliest."""
    meta = answer["meta_info"]
    both = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    return [(chosen[1], {token: logprob for logprob, token, *_ in top}) for chosen, top in both]
