"""Messages put together and edited: pure functions, one erratum a field, and nothing else touched."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.client import NEAR, Message, compose, edit
from sglang_pic.errors import ConfigError

HOWS = ["erratum", "field+erratum", "hoist"]

_words = st.text(alphabet='ab:"= \\.{}é', max_size=6)
_fields = st.sampled_from(["shelf", "price", "shelf life"]).flatmap(
    lambda field: st.sampled_from([f"{field}: 7", f"  - {field} = a: b", f"{field}:", f"see {field}: no"])
)
_errata = ['Correction: "price" is now "1".', 'Correction: "shelf" is now "2".', "Correction: none"]
_lines = _words | _fields | st.sampled_from(_errata)
_members = st.sampled_from(['{"shelf": "B7", "price": 3}', '  "shelf" : null,', '{"price": "\\"shelf\\": 1"}'])
_texts = st.lists(_lines, max_size=4).map("\n".join)
_parts = _texts.map(lambda text: {"type": "text", "text": text}) | st.just({"type": "image_url", "image_url": {}})
_contents = _texts | st.none() | st.lists(_parts, max_size=3)


def _messages(contents: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Message]]:
    roles = st.sampled_from(["system", "user", "assistant", "tool"])
    each = st.fixed_dictionaries({"role": roles, "content": contents, "name": st.just("n")})
    holder: Message = {"role": "system", "content": "You keep shelves.\nshelf: A1\nBe brief."}
    return st.tuples(st.lists(each, max_size=3), st.lists(each, max_size=3)).map(lambda two: [*two[0], holder, *two[1]])


_prompts = _messages(_contents)
_values = st.text(alphabet='abé":7 .\\', min_size=1, max_size=6).map(str.strip).filter(bool)


def errata(messages: list[Message], field: str) -> list[str]:
    """Every erratum of a field, in order."""
    return [line for line in lines(messages) if line.startswith(f"Correction: {json.dumps(field)} is now ")]


def lines(messages: list[Message]) -> list[str]:
    contents = (message["content"] or () for message in messages)
    parts = ([each] if isinstance(each, str) else [part.get("text", "") for part in each] for each in contents)
    return [line for texts in parts for text in texts for line in text.split("\n")]


@given(_prompts, _values, _values, st.sampled_from(HOWS))
def test_edits_replace_each_other_and_mutate_nothing(messages: list[Message], a: str, b: str, how: str) -> None:
    before = copy.deepcopy(messages)
    once = edit(messages, "shelf", a, how)
    assert messages == before
    assert edit(once, "shelf", a, how) == once, "idempotent"
    assert edit(edit(once, "shelf", b, how), "shelf", a, how) == once, "A -> B -> A is A"
    last = lines(once)[-1]
    if how == "hoist":
        assert (last, errata(once, "shelf")) == (f"shelf: {a}", [])
        assert sum(line.lstrip(" -").startswith(("shelf:", "shelf =")) for line in lines(once)) == 1
    else:
        assert errata(once, "shelf") == [last]
        assert json.loads(last.removeprefix('Correction: "shelf" is now ').removesuffix(".")) == a


@given(_prompts, _values, st.sampled_from(HOWS))
def test_other_messages_and_other_lines_are_untouched(messages: list[Message], value: str, how: str) -> None:
    def others(found: list[Message]) -> list[str]:
        return [line for line in lines(found) if "shelf" not in line and line]

    edited = edit(messages, "shelf", value, how)
    assert others(edited) == others(messages)
    mentions = [any("shelf" in line for line in lines([message])) for message in messages]
    kept = [message for message, names in zip(messages[:-1], mentions, strict=False) if not names]
    assert all(any(message is each for each in edited) for message in kept)
    assert errata(edited, "price") == errata(messages, "price")


@given(_messages(_members), _values)
def test_members_of_json_stay_json(messages: list[Message], value: str) -> None:
    state: Message = {"role": "user", "content": '{"shelf": "B7", "price": 3, "other": {"shelf": 1.5, "open": true}}'}
    edited = edit([*messages, state], "shelf", value, "field+erratum")
    member, erratum = edited[-1]["content"].split("\n")
    assert json.loads(member) == {"shelf": value, "price": 3, "other": {"shelf": _plain(value), "open": True}}
    assert errata(edited, "shelf") == [erratum]
    with pytest.raises(ConfigError, match="works for lines only, not in JSON"):
        edit([state], "shelf", value, "hoist")


def _plain(value: str) -> object:
    return int(value) if value.isascii() and value.isdigit() and (value == "0" or value[0] != "0") else value


def test_a_number_stays_a_number_and_a_text_a_text() -> None:
    messages: list[Message] = [{"role": "user", "content": '{"price": 3}\n{"price": "3"}'}]
    for value, number in (("12.5", "12.5"), ("free", '"free"')):
        (edited,) = edit(messages, "price", value, "field+erratum")
        assert edited["content"].split("\n")[:2] == [f'{{"price": {number}}}', f'{{"price": "{value}"}}']


def test_what_an_edit_looks_like() -> None:
    messages = compose("You keep shelves.\n- shelf: A1\nBe brief.", [], "Where is it?")
    assert [each["content"] for each in edit(messages, "shelf", "B7")] == [
        messages[0]["content"],
        'Where is it?\nCorrection: "shelf" is now "B7".',
    ]
    both = edit(messages, "shelf", "B7", "field+erratum")
    assert both[0]["content"] == "You keep shelves.\n- shelf: B7\nBe brief."
    assert [each["content"] for each in edit(messages, "shelf", "B7", "hoist")] == [
        "You keep shelves.\nBe brief.",
        "Where is it?\nshelf: B7",
    ]
    answered = [*messages, {"role": "assistant", "content": "On A1."}]
    assert edit(answered, "shelf", "B7")[-1] == {"role": "user", "content": 'Correction: "shelf" is now "B7".'}


@pytest.mark.parametrize(
    ("field", "value", "how", "named"),
    [
        ("shelf", "B7", "in place", "how='in place': must be one of 'erratum', 'field\\+erratum', 'hoist'"),
        ("drawer", "B7", "erratum", "field='drawer': the messages must have"),
        ("shelf", "B\n7", "erratum", "value='B\\\\n7'"),
    ],
)
def test_bad_arguments_are_named(field: str, value: str, how: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        edit(compose("shelf: A1", [], "Where is it?"), field, value, how)


def test_what_is_empty_is_left_out() -> None:
    assert compose("", ["a skill"], "") == [{"role": "system", "content": "a skill"}]
    assert NEAR["custom_params"]["pic"] == {"skills": "near"}


def test_a_skill_has_the_same_tokens_wherever_it_is_composed(model_dir: Callable[[str], Path]) -> None:
    """With a real tokenizer and chat template: as compiled, between other skills, in another order."""
    jinja2, tokenizers = pytest.importorskip("jinja2"), pytest.importorskip("tokenizers")
    folder = model_dir("smollm2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "chat_template.jinja").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokens(messages: list[Message]) -> list[int]:
        text = template.render(messages=messages, add_generation_prompt=False)
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    skills = ["Refunds take 3 days.\n\n", " 'quoted' {json: 1}", "être 1\n2"]
    head = len(tokens(compose("You are a clerk.", [], "")))
    for skill in skills:
        block = tokens(compose("You are a clerk.", [skill], ""))[head:]
        assert skill.strip() in tokenizer.decode(block)
        for order in (skills, skills[::-1]):
            composed = tokens(compose("Another system prompt.", order, "What now?"))
            assert any(composed[i : i + len(block)] == block for i in range(len(composed)))
