"""One session of three calls in the forms in which public tools record it, with what each form leaves out.

The forms follow their tools' documentation; the text is made here. `right` counts by jinja2 and tokenizers alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Json = dict[str, Any]

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ '<|t|>' + (tool | tojson) + '\\n' }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<|c|>' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|e|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|t|>", "<|c|>", "<|e|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
START = 1_780_754_400


class Call(NamedTuple):
    """A request and its answer, in OpenAI's form."""

    number: int
    messages: list[Json]
    tools: list[Json]
    answer: Json

    @property
    def body(self) -> Json:
        return {"model": "m", "messages": self.messages, "tools": self.tools}

    @property
    def response(self) -> Json:
        choice = {"index": 0, "message": self.answer, "finish_reason": "stop"}
        return {"id": f"r{self.number}", "object": "chat.completion", "choices": [choice]}

    @property
    def at(self) -> int:
        """Seconds."""
        return START + 60 * self.number

    @property
    def clock(self) -> str:
        return f"2026-06-06T14:{self.number:02}:00Z"


def make_calls(seed: int = 5) -> list[Call]:
    """The session: each call has the history of the one before, a call of a tool and its result."""
    rng = random.Random(seed)
    words = [f"{a}{b}" for a in ("tor", "bel", "mir", "sol", "ul") for b in ("vak", "nen", "rit", "dor")]

    def text(num: int) -> str:
        return " ".join(rng.choice(words) for _ in range(num)) + '. "Oui", dit-il: été,\n' + rng.choice(words)

    def tool(name: str) -> Json:
        schema = {"type": "object", "properties": {"path": {"type": "string", "description": text(9)}}}
        return {"type": "function", "function": {"name": name, "description": text(20), "parameters": schema}}

    tools = [tool("read_file"), tool("list_files")]
    messages: list[Json] = [{"role": "system", "content": text(60)}, {"role": "user", "content": text(40)}]
    calls = []
    for number in range(3):
        made = {"name": "read_file", "arguments": json.dumps({"path": f"src/{rng.choice(words)}.py"})}
        tool_calls = [{"id": f"call_{number}", "type": "function", "function": made}]
        answer = {"role": "assistant", "content": text(12), "tool_calls": tool_calls}
        calls.append(Call(number, deepcopy(messages), tools, answer))
        messages += [answer, {"role": "tool", "tool_call_id": f"call_{number}", "content": text(50)}]
    return calls


def write_model(folder: Path, calls: Sequence[Call]) -> Path:
    """A folder with a small tokenizer, trained on the session, and the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([json.dumps(call.body, ensure_ascii=False) for call in calls], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|e|>"}))
    return folder


def right(folder: Path, calls: Sequence[Call], *, answers: bool = True) -> list[tuple[int, int]]:
    """Prompt tokens and prefix hits of each call, against all earlier prompts and their answers."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE)

    def ids(messages: list[Json], tools: list[Json], *, is_prompt: bool) -> list[int]:
        parsed = deepcopy(messages)
        for message in parsed:
            for made in message.get("tool_calls") or []:
                made["function"]["arguments"] = json.loads(made["function"]["arguments"])
        text = template.render(messages=parsed, tools=tools, add_generation_prompt=is_prompt)
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    kept: list[list[int]] = []
    counts = []
    for call in calls:
        prompt = ids(call.messages, call.tools, is_prompt=True)
        hit = max((_shared(prompt, path) for path in kept), default=0)
        counts.append((len(prompt), hit))
        kept.append(ids([*call.messages, call.answer], call.tools, is_prompt=False) if answers else prompt)
    return counts


def _shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Form(NamedTuple):
    """A file in `tests/tools/traces/forms` with the session of `make_calls`, and what its form leaves out of it:
    `tools`, `system`, `calls` (of tools), `answers`."""

    name: str
    lacks: tuple[str, ...] = ()

    def seen(self, calls: Sequence[Call]) -> list[Call]:
        """The calls without what the form leaves out."""
        seen = []
        for call in calls:
            messages = deepcopy(call.messages)
            if "system" in self.lacks:
                messages = messages[1:]
            if "calls" in self.lacks:
                messages = [{"role": one["role"], "content": one["content"]} for one in messages]
            tools = [] if "tools" in self.lacks else call.tools
            answer = {**call.answer, "tool_calls": []} if "calls" in self.lacks else call.answer
            seen.append(Call(call.number, messages, tools, answer))
        return seen


FOLDER = Path(__file__).parents[1] / "tools" / "traces" / "forms"
LACKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pi.jsonl", "goose.jsonl", "opencode.json"), ("system", "tools")),
    **dict.fromkeys(("useful_chat.jsonl", "batches.jsonl"), ("tools", "answers")),
}
"""`useful_chat` has bodies of the AI SDK's `useChat`, `batches` those of Anthropic's batches."""
FORMS = [Form(path.name, LACKS.get(path.name, ())) for path in sorted(FOLDER.iterdir())]
"""`doubled_spans` has two instrumentations at once, `gateway_twice` each call when it came and when it was answered,
`kubernetes` lines that containerd has cut."""
