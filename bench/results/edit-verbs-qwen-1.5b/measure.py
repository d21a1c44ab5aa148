"""Asks a server about a changed field under each edit verb: `python measure.py MODEL BASE_URL OUT.jsonl [TEMPLATES]`.

The prompts are those of `fidelity --experiment edits` whose field is a line with a label, so that `client.edit` finds
it. The old prompt is served first, under a salt of each verb's own. Every verb is asked twice: for the answer alone,
and for thoughts before it. Only prompts count whose two full prefills, of the old and of the new values, answer right.
"""

from __future__ import annotations

import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from pic_bench.fidelity.cases.edits import Template, Writer, draw_values, templates
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import Family, TemplateSet

from sglang_pic.client import edit

LABEL = re.compile(r'(?:[-*] )?([\w ]+?)[ ]*[:=] ?\{value\}|\s*\{?.*"(\w+)": "?\{value\}"?.*')
DIRECT = "Reply with the answer alone, without a sentence."
THOUGHTS = "Think step by step in a few sentences, then write `Answer:` and the answer alone."
Messages = list[dict[str, Any]]


def label_of(template: Template) -> str | None:
    """The label of the first field, where its last line is `label: value` or a member of JSON."""
    found = LABEL.fullmatch(template.fields[0].line.splitlines()[-1].removesuffix("."))
    return None if found is None else (found[1] or found[2]).strip()


class Prompts:
    """The old and the new prompt of a template, as messages without their last line."""

    def __init__(self, template: Template, text: ModelText, number: int) -> None:
        rng = random.Random(f"edit-verbs-{template.name}-{number}")
        self.template = template
        self.values = draw_values(template, 1, rng)
        self._parts = Writer(template, text, 32, rng)
        old, new = (values[0] for values in self.values)
        self.answers = old[0].answer, new[0].answer
        self.new_value = new[1]

    def messages(self, which: int, ask: str) -> Messages:
        """The prompt with the old (0) or the new (1) values."""
        pairs = zip(self.template.fields, self.values[which], strict=True)
        fields = "\n".join(field.line.replace("{value}", value) for field, (_, value) in pairs) + self.template.after
        parts = self._parts
        top = [self.template.head, fields, parts._behind_fields, parts._rules, parts._before_question]
        question = f"{self.template.question} {self.template.lead}".strip()
        return [
            {"role": "system", "content": "\n\n".join(part for part in top if part)},
            {"role": "user", "content": f"{question} ...\n{ask}"},
        ]


def ask(client: httpx.Client, messages: Messages, salt: str, tokens: int, pic: dict[str, object]) -> dict[str, Any]:
    """The answer, and how many tokens were computed for it."""
    body = {"model": "x", "messages": messages, "temperature": 0, "max_tokens": tokens, "cache_salt": salt}
    body |= {"custom_params": {"pic": pic}, "return_cached_tokens_details": True}
    reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    usage = reply["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = reply["choices"][0]["message"]["content"] or ""
    return {"text": text, "prompt": usage["prompt_tokens"], "computed": usage["prompt_tokens"] - cached}


def is_right(text: str, right: str, wrong: str) -> bool:
    """Whether the last line that answers names the right answer, and not the other one."""
    said = text.lower().rsplit("answer:", 1)[-1].strip()
    names = [bool(re.search(rf"\b{re.escape(answer.lower())}\b", said)) for answer in (right, wrong)]
    return names == [True, False]


def measure(client: httpx.Client, prompts: Prompts, label: str, thoughts: bool) -> list[dict[str, Any]]:
    """A record for each verb."""
    line, tokens = (THOUGHTS, 120) if thoughts else (DIRECT, 10)
    old, new = prompts.messages(0, line), prompts.messages(1, line)

    # The line that asks stays last, whatever a verb appends.
    def changed(messages: Messages, how: str) -> Messages:
        """By the client's verb, in front of the question."""
        before, question = messages[:1], messages[1:]
        *rest, added = edit([*before, {"role": "user", "content": "?"}], label, prompts.new_value, how)
        note = added["content"].removeprefix("?").strip()
        return [*rest, {"role": "user", "content": f"{note}\n{question[0]['content']}"}]

    verbs: dict[str, tuple[Messages, dict[str, object]]] = {
        "recompile": (new, {"mode": "off"}),
        "stale": (old, {}),
        "erratum": (changed(old, "erratum"), {}),
        "field+erratum, in place": (changed(old, "field+erratum"), {"edit": "in_place", "tail_tokens": 0}),
        "in place": (new, {"edit": "in_place", "tail_tokens": 0}),
        "notes": (new, {"edit": "notes", "tail_tokens": 0}),
        "notes, tail of the default": (new, {}),
    }
    if '"' not in prompts.template.fields[0].line:  # Not for members of JSON.
        verbs["hoist"] = changed(old, "hoist"), {}

    def one(verb: str) -> dict[str, Any]:
        messages, pic = verbs[verb]
        salt = f"{prompts.template.name}-{thoughts}-{verb}"
        if verb != "recompile":
            ask(client, old, salt, 1, {key: value for key, value in pic.items() if key == "edit"})
        return {"verb": verb, **ask(client, messages, salt, tokens, pic)}

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, verbs))


def main(model: str, url: str, out: str, most: str = "100") -> None:
    """Write a record for each verb of each template."""
    text = ModelText(Path(model))
    client = httpx.Client(base_url=url, timeout=900)
    every = [each for of in (TemplateSet.REPORT, TemplateSet.FIND) for each in templates(of)]
    # A field that is overwritten stands in several lines with one label.
    chosen = [each for each in every if each.family.is_gated and each.family is not Family.OVERWRITE]
    labelled = [(each, label) for each in chosen if (label := label_of(each)) is not None][: int(most)]
    path = Path(out)
    done = {json.loads(line)["template"] for line in path.read_text().splitlines()} if path.exists() else set()
    for number, (template, label) in enumerate(labelled):
        if template.name in done:
            continue
        prompts = Prompts(template, text, 0)
        right, wrong = prompts.answers[1], prompts.answers[0]
        rows = []
        for thoughts in (False, True):
            before = ask(
                client,
                prompts.messages(0, THOUGHTS if thoughts else DIRECT),
                f"{template.name}-old-{thoughts}",
                120 if thoughts else 10,
                {"mode": "off"},
            )
            old_right = is_right(before["text"], wrong, right)
            for row in measure(client, prompts, label, thoughts) if old_right else []:
                rows.append(
                    {
                        "template": template.name,
                        "family": template.family.value,
                        "thoughts": thoughts,
                        "new": right,
                        "old": wrong,
                        "right": is_right(row["text"], right, wrong),
                        "says_old": is_right(row["text"], wrong, right),
                        **row,
                    }
                )
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows or [{"template": template.name, "verb": None}])
        print(
            f"{number + 1} of {len(labelled)} {template.name}: "
            + ", ".join(f"{row['verb']} {row['right']:d}" for row in rows),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
