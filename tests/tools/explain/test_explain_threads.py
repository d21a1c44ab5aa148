"""Ten patterns of public threads, in our words, that the rules of `explain` were not made on; each names its thread."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from pic_traces.session import Call, Message

from sglang_pic.core import CoreConfig
from sglang_pic.explain.cause import Cause
from sglang_pic.explain.grouping import Findings
from tests.helpers.explain_fakes import call_of, serve

NAMES = [f"{first}{second}" for first in ("mar", "tal", "fen", "bri", "ul") for second in ("dan", "kel", "wen", "ip")]


def prose(seed: int, num_words: int = 120) -> str:
    rng = random.Random(f"threads {seed}")
    words = [rng.choice(NAMES) for _ in range(num_words)]
    return ".\n".join(" ".join(words[at : at + 12]) for at in range(0, num_words, 12))


def said(role: str, content: object) -> Message:
    return {"role": role, "content": content}


def turns(count: int) -> list[Message]:
    pairs = [(said("user", prose(100 + n, 90)), said("assistant", prose(200 + n, 50))) for n in range(count)]
    return [one for pair in pairs for one in pair]


def session(head: Callable[[int], str], tools: Callable[[int], list[object]] | None = None) -> Iterator[Call]:
    """A session that only appends, behind a system prompt and tools that may change."""
    for n in range(4):
        call = call_of(
            [said("system", head(n)), *turns(n), said("user", prose(100 + n, 90))], prose(200 + n, 50), index=n
        )
        fields = {name: getattr(call, name) for name in call.__struct_fields__}
        yield Call(**{**fields, "tools": tools and tools(n)})


def between(value: Callable[[int], str]) -> Iterator[Call]:
    return session(lambda n: f"{prose(1)}\n{value(n)}\n{prose(2, 200)}")


def files(n: int) -> str:
    """A file is added somewhere in the middle of the list."""
    names = sorted([*(f"src/{name}.py" for name in NAMES), *(f"src/{name}_{k}.ts" for k, name in enumerate(NAMES[:n]))])
    return "<files>\n" + "\n".join(f"  {name}" for name in names) + "\n</files>"


def worktrees() -> Iterator[Call]:
    for n, name in enumerate(["master", "feature", "bisect", "release"]):
        folder = f" - Primary working directory: /tmp/the_project/{name}\n - Platform: linux"
        head = said("system", f"{prose(1, 60)}\n{folder}\n{prose(2, 300)}")
        yield call_of([head, said("user", "Please analyze the following.\n" + prose(3))], session=f"w{n}")


def ages(n: int) -> str:
    return "Memory index:\n" + "\n".join(f"- {prose(30 + k, 9)} [{NAMES[k]}|u|{3 + n + k}d]" for k in range(6))


def framing_removed() -> Iterator[Call]:
    """A plan's framing is a message in the middle, until the plan is done."""
    framing = said("user", f"[EXECUTING PLAN]\n{prose(40, 60)}")
    for n in range(4):
        history = turns(n + 4)
        middle = [framing] if n < 2 else []
        yield call_of(
            [said("system", prose(1)), *history[:2], *middle, *history[2:], said("user", "go")],
            prose(250 + n, 50), index=n,
        )  # fmt: skip


def image_stubs() -> Iterator[Call]:
    """An image is replaced by a text once the model has answered."""
    gone = "[image data removed - already processed by model]"
    for n in range(4):
        history: list[Message] = []
        for k in range(n + 1):
            url = {"url": f"data:image/png;base64,AAAA{k}BBBB"}
            shown = {"type": "image_url", "image_url": url} if k == n else {"type": "text", "text": gone}
            history += [said("user", [{"type": "text", "text": prose(300 + k, 60)}, shown]), *turns(k + 1)[-1:]]
            history += [said("user", prose(320 + k, 80)), said("assistant", "ok")] if k < n else []
        yield call_of([said("system", prose(1)), *history, said("user", prose(340 + n, 40))], index=n)


def skills(n: int) -> list[object]:
    """The skills are listed in the description of a tool near the front."""
    listed = "\n".join(f"- {name}: {prose(50 + k, 12)}" for k, name in enumerate(NAMES[: 5 + n]))
    described = [
        ("skill", f"Run a skill.\n{listed}\nNames are exact."),
        *((f"t{k}", prose(60 + k, 40)) for k in range(6)),
    ]
    return [
        {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object"}}}
        for name, text in described
    ]


def answers_trimmed() -> Iterator[Call]:
    for n in range(4):
        history = [
            one for k in range(n) for one in (said("user", prose(100 + k, 30)), said("assistant", prose(400 + k)))
        ]
        yield call_of(
            [said("system", prose(1)), *history, said("user", prose(100 + n, 30))], prose(400 + n) + "\n\n ", index=n
        )


def fenced() -> Iterator[Call]:
    """What a page wrote stands between fences whose nonce is another one in each process."""
    for n in range(4):
        nonce = random.Random(n).randbytes(16).hex()
        page = (
            f"--- PAGE_CONTENT nonce={nonce} origin=https://h.example ---\n{prose(70, 300)}\n--- END nonce={nonce} ---"
        )
        yield call_of(
            [said("system", prose(1)), said("user", "read it"), said("assistant", "ok"), said("user", page)],
            session=f"p{n}",
        )


def roster(n: int) -> str:
    states = ["idle", "running", "waiting for review", "done"]
    return "\n".join(
        f"- {name}: {prose(80 + k, 10)} (status: {states[(n + k) % 4]})" for k, name in enumerate(NAMES[:5])
    )


def memories(n: int) -> str:
    return f"## Memories\n{prose(90 + n, 100 + 9 * n)}"


THREADS: dict[str, tuple[Callable[[], Iterator[Call]], Cause]] = {
    "opencode#5224, files of the folder": (lambda: between(files), Cause.INSERTED),
    "claude-code#48236, folder of a worktree": (worktrees, Cause.FIELD),
    "LiveAgent#490, ages of memories in days": (lambda: between(ages), Cause.CLOCK),
    "LiveAgent#490, states of agents": (lambda: between(roster), Cause.FIELD),
    "plannotator#1380, a message leaves the middle": (framing_removed, Cause.REMOVED),
    "openclaw#58038, images become a text": (image_stubs, Cause.REMOVED),
    "qwen-code#4896, skills in a tool's description": (lambda: session(lambda _: prose(1), skills), Cause.INSERTED),
    "SillyTavern#4611, an answer's last spaces": (answers_trimmed, Cause.ANSWER),
    "goclaw#1506, memories by question": (lambda: between(memories), Cause.REPLACED),
    "MCPJam#4691, a fence with a nonce": (fenced, Cause.ID),
}  # fmt: skip


@pytest.mark.parametrize("name", THREADS)
def test_a_pattern_of_a_thread_is_named(name: str) -> None:
    make, cause = THREADS[name]
    findings, lost = Findings(), Counter[Cause]()
    for outcome in serve(make(), CoreConfig()):
        if (found := findings.add(outcome)) is not None:
            lost[found.cause] += found.num_lost + 1
    assert lost[cause] >= 0.8 * lost.total() > 0, lost
