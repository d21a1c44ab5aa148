"""The seeded generators: what repeats, what changes, how long it is, what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from difflib import SequenceMatcher
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pic_traces import Call, load
from pic_traces.errors import TraceError
from pic_traces.generate import WORKLOADS, list_options, partition_shift
from pic_traces.vocabulary import TOKENS_PER_WORD, approximate_tokens

SMALL = {
    "agent_meta": "header=60&body=200&calls=4&sessions=2",
    "sysvar": "before=300&after=100&calls=4&sessions=2",
    "compact": "system=100&every=5&keep=2&calls=12&sessions=2",
    "rerank": "documents=5&document=80&calls=4&sessions=2",
    "tool_variants": "tools=6&tool=60&system=50&calls=8&sessions=2",
    "reorder": "count=4&length=100&calls=4&sessions=2",
    "skills": "library=5&skill=100&calls=5&sessions=3",
    "tool_aging": "after=3&result=80&calls=9&sessions=2",
    "subagents": "code=80&sessions=2",
    "random": "prompt=100&sessions=3&calls=2",
}
"""Every workload, as small as its shape allows."""

OTHER_MODES = [
    "gen:tool_variants?history=kept&place=start&tools=6&tool=60&calls=8&sessions=2",
    "gen:reorder?items=tools&order=rotated&count=4&length=100&sessions=2",
    "gen:skills?via=tool&library=5&skill=100&calls=6&sessions=3",
    "gen:tool_aging?batch=3&after=3&result=80&calls=12&sessions=2",
]
SPECS = [*(f"gen:{name}?{query}" for name, query in SMALL.items()), *OTHER_MODES]


def all_calls(spec: str) -> list[Call]:
    """Every call of a spec, session after session."""
    return [call for session in load(spec) for call in session.calls()]


def goes_on(before: Call, after: Call) -> bool:
    """Whether a prompt begins with the one before it and its answer."""
    return after.messages[: len(before.messages) + 1] == [*before.messages, before.completion]


def text_of(call: Call, place: int) -> str:
    """The content of one message of a prompt."""
    content = call.messages[place]["content"]
    assert isinstance(content, str)
    return content


def num_words(text: object) -> int:
    return len(str(text).split())


def prose_len(text: str) -> float:
    """Approximate length of prose in tokens."""
    return num_words(text) * TOKENS_PER_WORD


def digest(value: object) -> str:
    """A hash of everything in a value, the order of keys included."""
    return hashlib.sha256(json.dumps(msgspec.to_builtins(value)).encode()).hexdigest()[:16]


def test_another_process_with_another_hash_seed_writes_the_same() -> None:
    code = (
        "import sys, msgspec\n"
        "from pic_traces import load\n"
        "sys.stdout.buffer.write(msgspec.json.encode([list(load(spec)) for spec in sys.argv[1:]]))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4321"}
    command = [sys.executable, "-c", code, *SPECS]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert done.stdout == msgspec.json.encode([list(load(spec)) for spec in SPECS])


def test_texts_of_recorded_results_stay_as_they_are() -> None:
    """Results in bench/results were measured on these texts."""
    for spec, expected in (("gen:random", "1f429da32ae991f0"), ("gen:agent_meta?sessions=1", "64e45f0b2ecda0ac")):
        assert digest([[call.messages, call.completion] for call in all_calls(spec)]) == expected


@pytest.mark.parametrize("spec", SPECS)
def test_the_seed_and_a_tokenizer_decide(spec: str, tokenizer_folder: Path) -> None:
    options = ("&seed=5", "&seed=6", f"&tokenizer={tokenizer_folder}")
    first, again = ([digest(list(load(spec + option))) for option in options] for _ in range(2))
    assert first == again
    assert len({*first, digest(list(load(spec)))}) == 4


@pytest.mark.parametrize("spec", SPECS)
def test_more_sessions_leave_the_others_alone(spec: str) -> None:
    few, more = list(load(spec)), list(load(re.sub(r"sessions=\d+", "sessions=5", spec)))
    assert len(more) == 5
    assert more[: len(few)] == few
    assert len({session.session_id for session in more}) == 5
    name = spec.removeprefix("gen:").partition("?")[0]
    assert {session.source for session in more} == {f"gen:{name}"}


@pytest.mark.parametrize("spec", SPECS)
def test_calls_are_what_a_server_takes(spec: str) -> None:
    """Roles, tool schemas, tool calls and results obey the API; answers follow a user or a tool result."""
    wanted = re.search(r"[?&]calls=(\d+)", spec)
    for session in load(spec):
        calls = list(session.calls())
        if wanted:
            assert sum(call.agent is None for call in calls) == int(wanted[1])
        for call in calls:
            assert call.messages[0]["role"] == "system"
            assert call.messages[-1]["role"] in ("user", "tool")
            assert call.completion is not None
            assert call.completion["role"] == "assistant"
            check_tools(call)
            open_ids: set[object] = set()
            for last, message in zip([{}, *call.messages], call.messages, strict=False):
                assert isinstance(message["content"], str)
                assert message["content"].strip()
                if message["role"] == "tool":
                    assert message["tool_call_id"] in open_ids
                    open_ids.remove(message["tool_call_id"])
                else:
                    assert not open_ids
                    assert message["role"] != last.get("role")
                open_ids |= {tool_call["id"] for tool_call in message.get("tool_calls", [])}  # type: ignore
            assert not open_ids


def check_tools(call: Call) -> None:
    """Schemas are complete and the answer calls some of them."""
    tools: Any = call.tools or []
    names = {tool["function"]["name"] for tool in tools}
    assert len(names) == len(tools)
    for tool in tools:
        function, parameters = tool["function"], tool["function"]["parameters"]
        assert (tool["type"], parameters["type"]) == ("function", "object")
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", function["name"])
        assert function["description"]
        assert set(parameters["required"]) <= set(parameters["properties"])
    completion: Any = call.completion
    for tool_call in completion.get("tool_calls", []):
        assert tool_call["type"] == "function"
        assert tool_call["function"]["name"] in names
        assert isinstance(json.loads(tool_call["function"]["arguments"]), dict)


def system_parts(spec: str) -> list[tuple[str, ...]]:
    """The paragraphs of every call's system message."""
    return [tuple(text_of(call, 0).split("\n\n")) for call in all_calls(spec)]


@pytest.mark.parametrize("header", [50, 250, 1000, 2000])
def test_agent_meta_changes_the_header_and_keeps_the_body(header: int) -> None:
    parts = system_parts(f"gen:agent_meta?header={header}&body=300&calls=5&sessions=3&seed=7")
    headers = [head for head, _ in parts]
    assert len({head[:20] for head in headers}) == 15
    assert len({body for _, body in parts}) == 1
    lengths = [prose_len(head) for head in headers]
    assert all(0.9 * header - 2 <= length <= 1.1 * header + 2 for length in lengths)
    assert len(set(lengths)) > 1
    assert num_words(parts[0][1]) == round(300 / TOKENS_PER_WORD)
    parts = system_parts(f"gen:agent_meta?header={header}&jitter=0&body=10&calls=4&sessions=2")
    assert {num_words(head) for head, _ in parts} == {round(header / TOKENS_PER_WORD)}


def test_agent_meta_grows_its_history() -> None:
    first, second, third = all_calls("gen:agent_meta?calls=3&sessions=1")
    assert [message["role"] for message in third.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert second.messages[1:3] == [first.messages[1], first.completion]
    assert third.messages[1:5] == [*second.messages[1:], second.completion]


def test_partition_shift_sweeps_the_header_and_nothing_else() -> None:
    specs = partition_shift()
    assert specs == [f"gen:agent_meta?header={length}" for length in (50, 250, 1000, 2000)]
    assert partition_shift([10]) == ["gen:agent_meta?header=10"]
    assert len({system_parts(f"{spec}&calls=1&sessions=1")[0][1] for spec in specs}) == 1


def test_sysvar_changes_a_few_words_late_in_the_system_prompt() -> None:
    parts = system_parts("gen:sysvar?before=1000&after=400&calls=6&sessions=2")
    assert len({(before, after) for before, _, after in parts}) == 1
    assert prose_len(parts[0][0]) == pytest.approx(1000, abs=2)
    assert prose_len(parts[0][2]) == pytest.approx(400, abs=2)
    fields = [field for _, field, _ in parts]
    assert len(set(fields)) == 12
    assert all(approximate_tokens(field) < 60 for field in fields)


@pytest.mark.parametrize(
    ("variable", "pattern"),
    [
        ("clock", r"Current time: 2026-\d\d-\d\d \d\d:\d\d:\d\d"),
        ("statistics", r"Session so far: \d+ messages, \d+ tokens"),
        ("model", r"Model: [a-z0-9-]+"),
    ],
)
def test_sysvar_has_a_clock_statistics_or_a_model_name(variable: str, pattern: str) -> None:
    fields = [field for _, field, _ in system_parts(f"gen:sysvar?variable={variable}&sessions=1")]
    assert all(re.fullmatch(pattern, field) for field in fields)
    assert len(set(fields)) > 2


def test_compact_replaces_old_history_and_keeps_the_tail() -> None:
    """In between the session only grows; the summary that comes back is the recorded answer of the call before."""
    calls = all_calls("gen:compact?every=6&keep=2&calls=20&sessions=1&summary=100&turn=30&answer=50")
    for k, (before, after) in enumerate(pairwise(calls), 1):
        assert (len(after.messages) < len(before.messages)) == (k in (6, 12, 18))
        if k not in (6, 12, 18):
            assert goes_on(before, after)
            continue
        assert after.messages[0] == before.messages[0]
        assert before.completion is not None
        assert text_of(after, 1).endswith(f"\n\n{before.completion['content']}")
        tail = after.messages[2:-1]
        assert [message["role"] for message in tail] == ["assistant", "user", "assistant"]
        # The last message before is the request for a summary, which is dropped again.
        assert tail == before.messages[-1 - len(tail) : -1]
        assert before.messages[1] not in after.messages
        assert prose_len(str(before.completion["content"])) == pytest.approx(100, abs=2)


@pytest.mark.parametrize(("place", "first"), [("start", 0), ("middle", 3), ("end", 7)])
def test_rerank_permutes_neighbours_where_it_is_told(place: str, first: int) -> None:
    calls = all_calls(f"gen:rerank?documents=10&document=100&permuted=3&place={place}&calls=6&sessions=2")
    prompts = [text_of(call, 1).split("\n\n") for call in calls]
    assert len({text_of(call, 0) for call in calls}) == 1
    assert {len(parts) for parts in prompts} == {11}
    still = {(*parts[:first], *parts[first + 3 : 10]) for parts in prompts}
    assert len(still) == 1
    moved = [tuple(parts[first : first + 3]) for parts in prompts]
    assert len({frozenset(documents) for documents in moved}) == 1
    assert len(set(moved[:6])) == 6
    assert len({parts[-1] for parts in prompts}) == 2
    assert all(prose_len(document) == pytest.approx(100, abs=4) for document in prompts[0][:-1])


def tool_lists(spec: str) -> list[list[str]]:
    """The tools of every call, each as compact JSON."""
    return [[json.dumps(tool, separators=(",", ":")) for tool in call.tools or []] for call in all_calls(spec)]


@pytest.mark.parametrize(("change", "num_tools"), [("wording", 8), ("added", 9), ("removed", 7)])
@pytest.mark.parametrize(("place", "untouched"), [("start", slice(4, None)), ("end", slice(0, 6))])
def test_tool_variants_differ_in_one_tool(change: str, num_tools: int, place: str, untouched: slice) -> None:
    lists = tool_lists(f"gen:tool_variants?tools=8&tool=120&variants=3&change={change}&place={place}&sessions=1")
    versions = [list(version) for version in dict.fromkeys(map(tuple, lists))]
    assert len(versions) == 3
    assert all(lists[k] != lists[k - 1] for k in range(1, 20))
    (plain,) = [v for v in versions if len(v) == 8 and sum(len(set(v) ^ set(w)) for w in versions) <= 4]
    for version in versions:
        if version != plain:
            assert len(version) == num_tools
            assert len(set(version) - set(plain)) == (change != "removed")
            assert len(set(plain) - set(version)) == (change != "added")
            assert set(plain[untouched]) <= set(version)
            names = [json.loads(tool)["function"]["name"] for tool in version]
            assert (names == [json.loads(tool)["function"]["name"] for tool in plain]) == (change == "wording")
    # An approximate counter sees a made schema within 5 % of the option; a reworded one is about as long.
    assert all(approximate_tokens(tool) == pytest.approx(120, rel=0.05) for tool in plain)


def test_tool_variants_keep_a_history_if_told_so() -> None:
    calls = all_calls("gen:tool_variants?history=kept&tools=5&calls=4&sessions=1")
    assert [len(call.messages) for call in calls] == [2, 4, 6, 8]
    assert all(starmap(goes_on, pairwise(calls)))
    assert {len(call.messages) for call in all_calls("gen:tool_variants?tools=5&calls=4&sessions=1")} == {2}


@pytest.mark.parametrize("order", ["shuffled", "rotated"])
def test_reorder_changes_the_order_and_nothing_else(order: str) -> None:
    for session in load(f"gen:reorder?count=4&calls=4&sessions=3&order={order}"):
        calls = list(session.calls())
        prompts = [text_of(call, 1).split("\n\n") for call in calls]
        assert len({tuple(parts[:4]) for parts in prompts}) == 4
        assert len({tuple(sorted(parts[:4])) for parts in prompts}) == 1
        assert len({(text_of(call, 0), len(call.messages)) for call in calls}) == 1
        assert len({parts[4] for parts in prompts}) == 1
        assert all(prose_len(document) == pytest.approx(1500, abs=4) for document in prompts[0][:4])


def test_reorder_changes_the_order_of_tools() -> None:
    spec = "gen:reorder?items=tools&count=5&length=150&calls=6&sessions=1"
    lists = tool_lists(spec)
    assert len(set(map(tuple, lists))) == 6
    assert len(set(map(frozenset, lists))) == 1
    assert len({json.dumps(call.messages) for call in all_calls(spec)}) == 1
    assert all(approximate_tokens(tool) == pytest.approx(150, rel=0.05) for tool in lists[0])


def test_reorder_begins_anew_when_all_orders_were_used() -> None:
    prompts = [text_of(call, 1) for call in all_calls("gen:reorder?count=2&length=60&calls=6&sessions=1")]
    assert len(set(prompts)) == 2
    assert all(prompts[k] != prompts[k - 1] for k in range(1, 6))


@pytest.mark.parametrize("via", ["user", "tool"])
def test_skills_come_from_a_library_and_stand_anywhere(via: str) -> None:
    """A skill is found as the longest paragraphs; two sessions share some, after other histories."""
    before: dict[str, set[str]] = {}
    for session in load(f"gen:skills?library=4&skill=300&pasted=2&via={via}&turn=40&calls=6&sessions=8"):
        calls = list(session.calls())
        last = calls[-1].messages
        texts = [(k, str(m["content"])) for k, m in enumerate(last) if m["role"] == via]
        skills = [(k, part) for k, text in texts for part in text.split("\n\n") if prose_len(part) > 200]
        assert len(skills) == len({skill for _, skill in skills}) == 2
        for k, skill in skills:
            assert prose_len(skill) == pytest.approx(300, abs=4)
            history = json.dumps(last[:k]) + str(last[k]["content"]).partition(skill)[0]
            before.setdefault(skill, set()).add(history)
            assert all(skill not in str(message["content"]) for message in last[:k])
        assert all(starmap(goes_on, pairwise(calls)))
    assert len(before) <= 4
    assert sum(map(len, before.values())) == 16
    assert len({len(history) for histories in before.values() for history in histories}) > 8


@pytest.mark.parametrize(("after", "batch"), [(1, 1), (4, 1), (4, 3)])
def test_tool_aging_puts_a_stub_in_place_of_old_results(after: int, batch: int) -> None:
    calls = all_calls(f"gen:tool_aging?after={after}&batch={batch}&result=200&calls=16&sessions=1")
    shown = [
        {str(m["tool_call_id"]): str(m["content"]) for m in call.messages if m["role"] == "tool"} for call in calls
    ]
    assert [len(results) for results in shown] == list(range(16))
    stubs: set[str] = set()
    for number, call_id in enumerate(shown[-1]):
        first = number + 1
        full = shown[first][call_id]
        assert approximate_tokens(full) == pytest.approx(200, rel=0.1)
        # Batch 1: the stub stands from `after` calls after the first prompt on. Else with the last of the batch.
        stubbed = first + after + (batch - 1 - number % batch)
        assert all(shown[k][call_id] == full for k in range(first, min(stubbed, 16)))
        late = {shown[k][call_id] for k in range(stubbed, 16)}
        assert len(late) <= 1
        assert full not in late
        stubs |= late
    assert len(stubs) == 1
    assert approximate_tokens(stubs.pop()) < 25
    others = [[m for m in call.messages if m["role"] != "tool"] for call in calls]
    assert all(others[k][:-1] == others[k - 1] for k in range(1, 16))


def test_subagents_get_parts_of_the_context_and_report_back() -> None:
    calls = all_calls("gen:subagents?subagents=3&steps=3&pasted=2&code=200&findings=90&calls=10&sessions=1")
    by_agent = {agent: [call for call in calls if call.agent == agent] for agent in (call.agent for call in calls)}
    main = by_agent.pop(None)
    assert len(main) == 10
    assert all(starmap(goes_on, pairwise(main)))
    assert list(by_agent) == ["subagent-1", "subagent-2", "subagent-3"]
    report = ""
    for own in by_agent.values():
        assert len(own) == 3
        starter, follower = calls[own[0].index - 1], calls[own[-1].index + 1]
        assert starter.agent is follower.agent is None
        assert own[0].messages[0] != starter.messages[0]
        assert len(own[0].messages) == 2
        task = text_of(own[0], 1)
        results = [str(message["content"]) for message in starter.messages if message["role"] == "tool"]
        files = [result for result in results if "\n" in result]
        pasted = [code for code in files if longest_common_lines(code, task) >= len(code.split("\n")) // 2]
        assert pasted == files[-2:]
        assert report in task
        started: Any = starter.completion
        assert json.loads(started["tool_calls"][0]["function"]["arguments"])["task"] == task
        answer: Any = own[-1].completion
        assert "tool_calls" not in answer
        report = answer["content"]
        assert follower.messages[-1] == {**follower.messages[-1], "role": "tool", "content": report}
        assert prose_len(report) == pytest.approx(90, abs=2)


def longest_common_lines(text: str, other: str) -> int:
    """Most lines in a row that two texts have in common."""
    return SequenceMatcher(None, text.split("\n"), other.split("\n"), autojunk=False).find_longest_match().size


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are words and punctuation marks."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def num_pieces(text: str) -> int:
    """What that tokenizer counts."""
    return len(re.findall(r"\w+|[^\w\s]+", text))


@given(size=st.integers(0, 120), seed=st.integers(0, 5))
@settings(max_examples=30)
def test_a_tokenizer_makes_lengths_exact(size: int, seed: int, tokenizer_folder: Path) -> None:
    spec = f"gen:agent_meta?header=30&jitter=0&body={size + 1}&calls=1&sessions=1&seed={seed}"
    ((header, body),) = system_parts(f"{spec}&tokenizer={tokenizer_folder}")
    assert num_pieces(header) == 30
    assert num_pieces(body) == size + 1


def test_code_and_tools_follow_a_tokenizer(tokenizer_folder: Path) -> None:
    """A tool to a word, code to a line."""
    for call in all_calls(f"gen:tool_aging?result=300&calls=8&sessions=1&tokenizer={tokenizer_folder}"):
        results = [str(message["content"]) for message in call.messages if message["role"] == "tool"]
        assert all(285 <= num_pieces(text) <= 300 or num_pieces(text) < 30 for text in results)
    for tools in tool_lists(f"gen:reorder?items=tools&length=90&sessions=2&tokenizer={tokenizer_folder}"):
        assert all(89 <= num_pieces(tool) <= 91 for tool in tools)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gen:nothing", r"no generator 'nothing'; allowed are\n  gen:agent_meta: a header that"),
        ("gen:agent_meta?headers=3", "unknown option 'headers'; allowed are header, jitter, body"),
        ("gen:agent_meta?header=many", "header='many': must be a whole number, 0 or more; 250 is the default"),
        ("gen:agent_meta?jitter=1.5", r"jitter='1\.5': must be a number between 0 and 1"),
        ("gen:agent_meta?calls", "options are written key=value"),
        ("gen:random?calls=1&calls=2", "calls is set twice"),
        (
            "gen:sysvar?variable=date",
            "variable='date': must be one of clock, statistics, model, all; all is the default",
        ),
        (
            "gen:random?tokenizer=/no",
            r".*/no/tokenizer\.json does not exist; a folder with a tokenizer\.json is expected",
        ),
        ("gen:compact?every=40", "every=40: must be less than calls=40, or nothing is compacted"),
        ("gen:compact?every=9&keep=8", "keep=8: must be 7 or less with every=9"),
        ("gen:rerank?permuted=21", "permuted=21: must be documents=20 or less"),
        ("gen:tool_variants?tools=4&variants=6", "variants=6: must be 5 or less with tools=4"),
        ("gen:skills?pasted=9", "pasted=9: must be library=12 and calls=8 or less"),
        ("gen:skills?pasted=8&via=tool", "pasted=8: must be less than calls=8 with via=tool"),
        ("gen:tool_aging?after=24", r"after=24: after \+ batch must be less than calls=24"),
        ("gen:subagents?subagents=5", "calls=10: must be 12 or more with subagents=5"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(TraceError, match=rf"^{re.escape(spec)}: {message}"):
        load(spec)


def test_an_unknown_name_lists_all() -> None:
    assert list(SMALL) == list(WORKLOADS), "the tests have every workload"
    with pytest.raises(TraceError) as caught:
        load("gen:?calls=1")
    assert all(f"gen:{name}: {workload.summary}" in str(caught.value) for name, workload in WORKLOADS.items())


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_whole_number_has_a_limit_that_holds(name: str) -> None:
    for option in list_options(WORKLOADS[name].kind):
        if limit := re.fullmatch(r"a whole number, (\d+) or more", option.allowed):
            with pytest.raises(TraceError, match=rf"{option.name}='{int(limit[1]) - 1}': must be {option.allowed}"):
                load(f"gen:{name}?{option.name}={int(limit[1]) - 1}")
