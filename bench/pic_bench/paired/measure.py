"""One prompt under all arms: each is forced to the full prefill's own answer.

Where an arm would part from it, and the kind has a judge, the arm goes on to its own answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import SURE
from pic_bench.paired.arms import Arm, Block, attended_arms, policy_arms
from pic_bench.paired.cases import Judge, Prompt, donor_ends
from pic_bench.paired.forward import Forward, Probe, Rows
from pic_bench.paired.record import Record
from sglang_pic.core import Tokens, as_tokens, common_len

_KNOWN = 64
LAST_GAP = 64
"""Most tokens of the last gap whose attention chooses."""
TIE = 0.25
"""Nats: a token that is no further behind is as likely; logits of 16 to 32 are that far apart in two steps of bf16."""


@dataclass(slots=True)
class Full:
    """The full prefill of a prompt, with an answer behind it: its own, or the recorded one where nobody judges."""

    rows: Rows
    logits: Tensor
    """`[answer, vocabulary]`."""
    answer: list[int]
    likeliest: list[int]
    """Tokens: of its own answer, the answer itself."""


class Measure:
    """Measures prompts of one model.

    Args:
        layers: three whose attention finds a document, from 0.
    """

    def __init__(self, forward: Forward, text: ModelText, layers: Sequence[int]) -> None:
        self._forward, self._text, self._layers = forward, text, layers
        # The last prompt that was computed in full: requests of one session begin with the same text.
        self._known: deque[tuple[Tokens, Rows]] = deque(maxlen=_KNOWN)

    def records(self, prompt: Prompt, number: int) -> Iterator[Record]:
        """A record for each arm; none where the full prefill's answer is wrong, or no other one than before."""
        ends = donor_ends(prompt.plans)
        paths, is_stale = list(ends), prompt.answers is not None
        donors = [self._computed(path.tokens().tolist()) for path in paths] if is_stale else []
        stale = self._odds(prompt, donors[0][1]) if donors else None
        full = self._full(prompt, stale)
        if full is None:
            return
        said = self._text.answer(full.answer)
        if not full.answer or (prompt.judge is not None and not prompt.judge(said, said)):
            return
        arms = policy_arms(prompt.plans, paths, number)
        if not is_stale and prompt.judge is not None and "any-order" in prompt.plans:
            arms += attended_arms(prompt.plans["any-order"], paths, number)
        donors = donors or [self._computed(path.tokens(end).tolist()) for path, end in ends.items()]
        known: dict[object, Record] = {}
        for arm in arms:
            key = (tuple(arm.blocks), arm.rotates, arm.is_exact, tuple(arm.whole), arm.drawn)
            if key not in known:
                known[key] = self._record(prompt, full, arm, [rows for rows, _ in donors], stale)
            yield msgspec.structs.replace(known[key], arm=arm.name)
        if prompt.whole is not None:
            _, logits = self._computed(prompt.whole + full.answer[:-1], len(full.answer))
            yield self._compared(prompt, full, Arm(name="whole", blocks=()), logits, stale)

    def _full(self, prompt: Prompt, stale: float | None) -> Full | None:
        """The full prefill, and its greedy answer; what the gold answer has of it is computed in the same pass.

        A recorded answer is another model's: this one need not find it, only say the same of it in every arm. None if
        the odds are not for the old answer in the old prompt (`stale`), and for the new one in this prompt.
        """
        if stale is not None and stale >= 0:
            return None
        ids, most = prompt.ids, prompt.num_tokens
        draft = prompt.gold[: most - 1]
        rows, hidden = self._begin(ids + draft, len(ids) + most, 1 + len(draft))
        logits = self._forward.logits(hidden)
        if stale is not None and self._odds(prompt, logits) <= 0:
            return None
        likeliest = logits.argmax(-1).tolist()
        if draft and prompt.judge is None and prompt.answers is None:
            answer = prompt.gold[: len(likeliest)]
            return Full(rows, logits[: len(answer)], answer, likeliest[: len(answer)])
        num = next((i for i, token in enumerate(draft) if likeliest[i] != token), len(draft))
        answer, found = likeliest[: num + 1], [logits[: num + 1]]
        rows.is_there[len(ids) + num :] = False
        while len(answer) < most and not self._text.ends(answer[-1]):
            logits = self._next(answer[-1], len(ids) + len(answer) - 1, rows)
            answer.append(int(logits.argmax()))
            found.append(logits)
        return Full(rows, torch.cat(found), answer, answer)

    def _next(self, token: int, at: int, rows: Rows) -> Tensor:
        """The logits behind a token at a position, `[1, vocabulary]`."""
        return self._forward.logits(self._forward.compute(torch.tensor([token]), torch.tensor([at]), rows))

    def _computed(self, ids: Sequence[int], num: int = 1) -> tuple[Rows, Tensor]:
        """The rows of a text, such as a donor's path, and its last `num` logits."""
        rows, hidden = self._begin(ids, len(ids), num)
        return rows, self._forward.logits(hidden)

    def _begin(self, ids: Sequence[int], room: int, num: int) -> tuple[Rows, Tensor]:
        """Compute a prompt behind the longest exact prefix that is known; also the last `num` hidden states."""
        tokens = as_tokens(ids)
        shared, known = max(
            ((min(common_len(before, tokens), len(ids) - num), at) for at, (before, _) in enumerate(self._known)),
            default=(0, 0),
        )
        rows = self._known[known][1].first(shared, room) if shared > 0 else self._forward.rows(room)
        at = torch.arange(shared, len(ids))
        hidden = self._forward.compute(torch.tensor(ids)[at], at, rows)[-num:]
        self._known.append((tokens[: len(ids) - num + 1], rows))
        return rows, hidden

    def _odds(self, prompt: Prompt, logits: Tensor) -> float:
        """Log odds of the new answer's first token against the old one's, by logits `[answer, vocabulary]`."""
        assert prompt.answers is not None
        return float(logits[0, prompt.answers.new] - logits[0, prompt.answers.old])

    def _record(self, prompt: Prompt, full: Full, arm: Arm, donors: Sequence[Rows], stale: float | None) -> Record:
        num, answer = len(prompt.ids), full.answer
        if not arm.blocks:
            return self._compared(prompt, full, arm, full.logits, stale)
        ids = torch.tensor(prompt.ids + answer)
        rows = full.rows.first(prompt.prefix_len, len(ids))
        for block in arm.blocks:
            self._splice(rows, block, full.rows if arm.is_exact else donors[block.donor], arm)
        is_spliced = rows.is_there.clone()
        gaps = (~is_spliced[:num]).nonzero()[:, 0]
        again = 0
        last = max(block.end for block in arm.blocks)
        if arm.whole:
            scores = [0.0] * len(arm.whole)
            self._forward.compute(ids[gaps], gaps, rows, probe=self._scoring(arm.whole, gaps, last, scores))
            chosen = _chosen(arm, arm.whole[scores.index(max(scores))])
            for block in chosen:
                again += int((~is_spliced[block.start : block.end]).sum())
                is_spliced[block.start : block.end] = False
            again += num - last
            gaps = torch.cat([torch.arange(block.start, block.end) for block in chosen] + [torch.arange(last, num)])
        at = torch.cat([gaps, torch.arange(num, len(ids) - 1)])
        hidden = self._forward.compute(ids[at], at, rows)[-len(answer) :]
        logits = self._forward.logits(hidden)
        found = self._compared(prompt, full, arm, logits, stale)
        right = found.right
        if not right and prompt.judge is not None:
            right = self._is_right(prompt, full, rows, logits.argmax(-1).tolist(), prompt.judge)
        spliced = int(is_spliced[prompt.prefix_len : num].sum())
        return msgspec.structs.replace(found, spliced=spliced, again=again, right=right)

    def _compared(self, prompt: Prompt, full: Full, arm: Arm, logits: Tensor, stale: float | None) -> Record:
        """The record of an arm's logits `[answer, vocabulary]`, as if nothing were spliced or judged."""
        logprobs = full.logits.log_softmax(-1)
        probabilities = logprobs.exp()
        kl = (probabilities * (logprobs - logits.log_softmax(-1))).sum(-1).clamp(min=0)
        is_sure = (probabilities.amax(-1) > SURE).numpy()
        likeliest = logits.argmax(-1)
        is_equal = likeliest.numpy() == np.array(full.likeliest)
        behind = logprobs.amax(-1) - logprobs.gather(-1, likeliest[:, None])[:, 0]
        recovery = None
        if stale is not None:
            # Above 0: `records` takes no prompt whose answer is the old one.
            moved = self._odds(prompt, full.logits) - stale
            recovery = round((self._odds(prompt, logits) - stale) / moved, 4)
        return Record(
            kind=prompt.kind,
            prompt=prompt.name,
            arm=arm.name,
            tokens=len(prompt.ids) - prompt.prefix_len,
            spliced=0,
            again=0,
            kept=bool(is_equal.all()),
            right=bool(is_equal.all() if prompt.judge is not None else behind.max() <= TIE),
            kl=round(float(kl.mean()), 6),
            worst=round(float(kl.max()), 5),
            sure=int(is_sure.sum()),
            flips=int((is_sure & ~is_equal).sum()),
            answer=len(full.answer),
            lead=round(float(behind.max()), 4),
            recovery=recovery,
        )

    def _splice(self, rows: Rows, block: Block, donor: Rows, arm: Arm) -> None:
        rows.take(donor, block.start, block.end, block.start if arm.is_exact else block.donor_start)
        shift = block.start - block.donor_start
        if not arm.rotates and shift:
            back = torch.full((block.end - block.start,), -shift)
            for keys in rows.keys[:, block.start : block.end]:
                keys.copy_(self._forward.rotated(keys, back))

    def _scoring(self, blocks: Sequence[Block], at: Tensor, last: int, scores: list[float]) -> Probe:
        """A probe that adds each block's best attended token over heads and rows of the last gap."""
        asking = (at >= last).nonzero()[:, 0][-LAST_GAP:]

        def probe(layer: int, queries: Tensor, keys: Tensor) -> None:
            if layer not in self._layers:
                return
            query = queries[asking]
            grouped = query.view(len(asking), keys.shape[1], -1, keys.shape[2])
            found = torch.einsum("nkgd,rkd->nkgr", grouped.float(), keys.float()) * keys.shape[2] ** -0.5
            behind = torch.arange(keys.shape[0])[None] > at[asking][:, None]
            found.masked_fill_(behind[:, None, None], float("-inf"))
            mean = found.softmax(-1).mean((0, 1, 2))
            for i, block in enumerate(blocks):
                scores[i] += float(mean[block.start : block.end].max())

        return probe

    def _is_right(self, prompt: Prompt, full: Full, rows: Rows, likeliest: Sequence[int], judge: Judge) -> bool:
        """Whether the arm's own greedy answer is right, which parts from the full prefill's somewhere."""
        num, at = len(prompt.ids), common_len(as_tokens(full.answer), as_tokens(likeliest))
        said = [*full.answer[:at], likeliest[at]]
        rows = rows.first(num + at, num + prompt.num_tokens)
        while len(said) < prompt.num_tokens and not self._text.ends(said[-1]):
            said.append(int(self._next(said[-1], num + len(said) - 1, rows).argmax()))
        return judge(self._text.answer(said), self._text.answer(full.answer))


def _chosen(arm: Arm, attended: Block) -> list[Block]:
    """The blocks of pass two, in order; drawn ones have no fewer tokens than the attended one."""
    if arm.drawn is None:
        return [attended]
    left, chosen = attended.end - attended.start, list[Block]()
    for block in arm.drawn.sample(list(arm.whole), len(arm.whole)):
        if left <= 0:
            break
        chosen.append(block)
        left -= block.end - block.start
    return sorted(chosen)
