"""Keys of JSON objects in another order are moved text; whatever else differs in an object is a changed field."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from itertools import count, takewhile
from typing import Any

import numpy as np
import pytest

from sglang_pic.core import ContentIndex, CoreConfig, Lexicon, Plan, Tokens, as_tokens
from sglang_pic.core.alignment import Difference
from sglang_pic.core.key_order import KeyOrder
from sglang_pic.core.plan import Context
from sglang_pic.core.trie import Trie
from tests.helpers.core_builders import plan_of

CONFIG = CoreConfig(tail_tokens=0)
_PIECE = re.compile(r' ?[A-Za-z]+|\d| ?[\[{]"?|"?[\]}]+[,:]?|",?:?|[^\w]')
# One character of two tokens, and another: half of a character has no text.
HALVES = ["\ufffd", "\ufffd", "\ufffd"]


class Cutter:
    """Cuts texts into words and clusters of signs, as tokenizers do."""

    def __init__(self) -> None:
        self.texts = [*HALVES]
        self._ids: dict[str, int] = {}

    def cut(self, text: str) -> list[int]:
        pieces = _PIECE.findall(text)
        assert "".join(pieces) == text
        for piece in pieces:
            if piece not in self._ids:
                self._ids[piece] = len(self.texts)
                self.texts.append(piece)
        return [self._ids[piece] for piece in pieces]


def words(num_words: int, seed: int) -> str:
    """A text that is its own for each seed."""
    rng = np.random.default_rng(seed)
    letters = [chr(97 + number) for number in range(26)]
    return " ".join("".join(rng.choice(letters, 5)) for _ in range(num_words))


HEAD, LONG, BODY = words(60, 1), words(140, 2), words(300, 3)
# It names what the objects below have: behind a changed field it would be computed.
MENTIONS = "The compass is required. Ann is before Bea. From Paris to Rome by noon at 12. "
END = f"\n{MENTIONS}\n{BODY}\n{MENTIONS}\n{words(60, 4)}"


def plan_behind(old: str | Tokens, new: str | Tokens, cutter: Cutter | None = None) -> Plan:
    """The plan of a prompt that has `new` where an earlier one had `old`."""
    cutter = cutter or Cutter()
    prompts = [
        as_tokens(
            [*cutter.cut(HEAD + "\n"), *(cutter.cut(middle) if isinstance(middle, str) else middle), *cutter.cut(END)]
        )
        for middle in (old, new)
    ]
    index = ContentIndex(CONFIG, lexicon=Lexicon(cutter.texts))
    index.publish("a", prompts[0], [(0, len(prompts[0]))])
    return plan_of(index, prompts[1])


TOOL = {
    "type": "function",
    "function": {
        "name": "steer",
        "parameters": {
            "type": "object",
            "properties": {"compass": {"type": "string", "description": LONG}, "speed": {"type": "number"}},
            "required": ["compass"],
        },
    },
}


def in_order(value: Any, rng: np.random.Generator) -> Any:
    """The same value, the keys of its objects in an order of their own."""
    if isinstance(value, list):
        return [in_order(each, rng) for each in value]
    if not isinstance(value, dict):
        return value
    keys = [list(value)[at] for at in rng.permutation(len(value))]
    return {key: in_order(value[key], rng) for key in keys}


@pytest.mark.parametrize("seed", range(24))
def test_keys_in_another_order_are_moved_text(seed: int) -> None:
    """Before a run, around it, and where an object goes on behind it."""
    rng = np.random.default_rng(seed)
    old, new = (json.dumps(in_order(TOOL, rng)) for _ in range(2))
    plan = plan_behind(old, new)
    assert (plan.changed_fields, plan.num_guarded) == ((), 0)
    assert {run.context for run in plan.runs} <= {Context.SAME, Context.MOVED}
    assert plan.num_spliced > 300


def spelled(**members: str) -> str:
    """An object whose values are given as they are written."""
    return "{" + ", ".join(f'"{key}": {value}' for key, value in members.items()) + "}"


NOTE = f'"{LONG}"'
CHANGES = {
    "values swapped": (spelled(x="1", y="2", note=NOTE), spelled(x="2", y="1", note=NOTE)),
    "values of objects swapped": (
        spelled(a='{"x": 1}', b='{"x": 2}', note=NOTE),
        spelled(a='{"x": 2}', b='{"x": 1}', note=NOTE),
    ),
    "list": (spelled(order='["Ann", "Bea"]', note=NOTE), spelled(order='["Bea", "Ann"]', note=NOTE)),
    "list of objects": (
        spelled(steps='[{"go": "Paris"}, {"go": "Rome"}]', note=NOTE),
        spelled(steps='[{"go": "Rome"}, {"go": "Paris"}]', note=NOTE),
    ),
    "sentence": (
        spelled(trip='"from Paris to Rome"', note=NOTE),
        spelled(trip='"from Rome to Paris"', note=NOTE),
    ),
    "digits": (spelled(at='"12:30"', note=NOTE), spelled(at='"13:20"', note=NOTE)),
    "number and string": (spelled(x="1", y="2", note=NOTE), spelled(y="2", x='"1"', note=NOTE)),
    "number and truth": (spelled(x="1", y="2", note=NOTE), spelled(y="2", x="true", note=NOTE)),
    "another object's member": (
        spelled(a='{"k": 1, "m": 3}', b='{"n": 2}', note=NOTE),
        spelled(a='{"m": 3}', b='{"k": 1, "n": 2}', note=NOTE),
    ),
    "member less": (spelled(x="1", y="2", note=NOTE), spelled(x="1", note=NOTE)),
    "order and a value": (spelled(x="1", y="2", z="3", note=NOTE), spelled(y="2", x="1", z="4", note=NOTE)),
    "key twice": (spelled(x="1", note=NOTE)[:-1] + ', "x": 2}', spelled(x="2", note=NOTE)[:-1] + ', "x": 1}'),
    "object in a string": ('{\\"x\\": 1, \\"y\\": 2}, ' + LONG, '{\\"y\\": 2, \\"x\\": 1}, ' + LONG),
    "no JSON": ("{Ann is before Bea} " + LONG, "{Bea is before Ann} " + LONG),
    "prose": ("Ann is before Bea. " + LONG, "Bea is before Ann. " + LONG),
    "pairs without an object": ("x=1, y=2. " + LONG, "y=2, x=1. " + LONG),
    "cut off": (spelled(x="1", y="2", note=NOTE)[:-1], spelled(y="2", x="1", note=NOTE)[:-1]),
    "order and what follows": (
        f"{spelled(x='1', y='2')} costs 5. {LONG}",
        f"{spelled(y='2', x='1')} costs 6. {LONG}",
    ),
    "beside the object": (
        f"{spelled(x='1', note=NOTE)} costs 5 {words(80, 6)}",
        f"{spelled(x='1', note=NOTE)} costs 6 {words(80, 6)}",
    ),
}


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_what_says_something_else_is_a_changed_field(old: str, new: str, is_swapped: bool) -> None:
    plan = plan_behind(*((new, old) if is_swapped else (old, new)))
    assert plan.changed_fields
    assert plan.num_guarded > 0
    assert Context.MOVED not in {run.context for run in plan.runs}


def changed(value: Any, rng: np.random.Generator) -> Any:
    """Another value of the same letters and digits, if there is one: two leaves, elements or keys swapped."""
    flat = json.dumps(value)
    leaves = [*re.finditer(r'\d+|"[a-z]"', flat)]
    one, other = sorted(rng.choice(len(leaves), 2, replace=False))
    first, second = leaves[one], leaves[other]
    text = flat[: first.start()] + second.group() + flat[first.end() : second.start()] + first.group()
    try:
        return json.loads(text + flat[second.end() :])
    except ValueError:
        return value


def drawn(rng: np.random.Generator, depth: int = 0) -> Any:
    """A value of few letters and digits, which look alike in any order."""
    kind = int(rng.integers(4)) if depth < 3 else 3
    if kind == 0 and depth:
        return [drawn(rng, depth + 1) for _ in range(rng.integers(1, 4))]
    if kind == 1 or depth == 0:
        keys = rng.permutation(list("abcdef"))[: rng.integers(2, 5)]
        return {str(key): drawn(rng, depth + 1) for key in keys}
    return int(rng.integers(10)) if kind == 2 else str(rng.choice(list("abcdef")))


def test_no_other_value_is_ever_taken_for_another_order() -> None:
    """Whatever the aligner sees of a change, it is still guarded; long text that moved it does not look into."""
    num_moved = num_changed = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        old = {**drawn(rng), "note": LONG}
        new = in_order(changed(old, rng) if seed % 2 else old, rng)
        if json.dumps(old) == json.dumps(new):
            continue
        found = plan_behind(json.dumps(old), json.dumps(new)).changed_fields
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeyOrder, "alone_differs", lambda *_: False)
            differs = plan_behind(json.dumps(old), json.dumps(new)).changed_fields
        if old == new:
            num_moved += bool(differs) and not found
        elif differs:
            num_changed += 1
            assert found, (old, new)
    assert num_changed > 8
    assert num_moved


def test_one_plan_compares_so_many_objects_and_no_more() -> None:
    """Its time is bounded, however much differs."""
    cutter = Cutter()
    old, new = (as_tokens(cutter.cut(spelled(**each))) for each in ({"x": "1", "y": "2"}, {"y": "2", "x": "1"}))
    trie = Trie("a", OrderedDict(), count())
    node, end = trie.append(trie.root, old), len(old) - 1
    order, field = KeyOrder(new, Lexicon(cutter.texts)), Difference(old[1:end], old[:1], (1, end), 1)
    times = sum(takewhile(bool, (order.alone_differs(field, node) for _ in range(1_000))))
    assert 20 < times < 100
