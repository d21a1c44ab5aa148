"""Serving-level traces of other tools: what is counted of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces import load
from pic_traces.blocks import BlockFormat, prefix_census, read_blocks, recognize_blocks
from pic_traces.errors import TraceError

from tests.helpers.files import write

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"


def mooncake(ids: list[int], input_length: int | None = None, timestamp: int = 0) -> dict[str, object]:
    length = 512 * len(ids) if input_length is None else input_length
    return {"timestamp": timestamp, "input_length": length, "output_length": 5, "hash_ids": ids}


def weka(name: str, *requests: dict[str, object]) -> dict[str, object]:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def weka_request(t: float, *ranges: list[int], extra: int = 0) -> dict[str, object]:
    length = 64 * sum(end - start for start, end in ranges) + extra
    return {"t": t, "type": "n", "in": length, "out": 7, "hash_ranges": list(ranges)}


def test_mooncake(tmp_path: Path) -> None:
    lines = [mooncake([0, 1, 2], 1100), mooncake([0, 1, 3], timestamp=2500), mooncake([0, 1, 2], 1100), mooncake([1])]
    path = write(tmp_path / "whatever.gz", *lines)
    assert recognize_blocks(path) is BlockFormat.MOONCAKE
    requests = list(read_blocks(path))
    assert [list(request.block_ids) for request in requests] == [[0, 1, 2], [0, 1, 3], [0, 1, 2], [1]]
    assert (requests[1].t, requests[1].input_len, requests[1].output_len) == (2.5, 1536, 5)
    assert (requests[1].block_size, requests[1].scope, requests[1].agent) == (512, "", None)
    census = prefix_census(path)
    # The third prompt is known whole, the last token of it is computed all the same. The block 1 was never in front.
    assert (census.calls, census.prompt_tokens) == (4, 1100 + 1536 + 1100 + 512)
    assert census.prefix_tokens == 0 + 1024 + 1099 + 0
    assert census.sessions == 0
    assert "names a block together with everything before it" in census.note


def test_weka(tmp_path: Path) -> None:
    subagent = {"t": 10.0, "type": "subagent", "agent_id": "a1", "requests": [weka_request(5.0, [7, 9], [1, 2])]}
    path = write(
        tmp_path / "t.jsonl",
        weka("one", weka_request(0, [1, 3]), subagent, weka_request(12.0, [1, 3], [3, 4], extra=63)),
        weka("two", weka_request(0, [1, 3])),
    )
    assert recognize_blocks(path) is BlockFormat.WEKA
    requests = list(read_blocks(path))
    # By time: the subagent's own clock starts at 10.
    found = [(request.scope, request.agent, request.t) for request in requests]
    assert found == [("one", None, 0.0), ("one", None, 12.0), ("one", "a1", 15.0), ("two", None, 0.0)]
    assert list(requests[2].block_ids) == [7, 8, 1]
    census = prefix_census(path)
    assert (census.sessions, census.calls, census.prompt_tokens) == (2, 4, 128 + 255 + 192 + 128)
    # Ids of the second trace are its own: nothing of it is known.
    assert census.prefix_tokens == 128
    assert "ids are local to a trace, so what traces share is unknown" in census.note
    (read,) = read_blocks(write(tmp_path / "plain.json", weka("one", {"t": 0, "in": 130, "hash_ids": [4, 5]})))
    assert list(read.block_ids) == [4, 5]


@given(prompts=st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=8))
def test_hits_are_the_longest_known_prefix(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where an id is of content alone, and stands at several places."""
    path = write(tmp_path_factory.mktemp("t") / "t.jsonl", *map(mooncake, prompts))
    expected, known = 0, {()}
    for prompt in prompts:
        prefixes = [tuple(prompt[:end]) for end in range(len(prompt) + 1)]
        shared = max(len(prefix) for prefix in prefixes if prefix in known)
        expected += min(512 * shared, max(512 * len(prompt) - 1, 0))
        known.update(prefixes)
    assert prefix_census(path).prefix_tokens == expected


def test_azure_says_nothing_about_reuse(tmp_path: Path) -> None:
    path = write(tmp_path / "azure.csv", AZURE)
    assert recognize_blocks(path) is BlockFormat.AZURE
    for read in (prefix_census, read_blocks):
        with pytest.raises(TraceError, match=r"azure\.csv: an Azure trace says nothing about reuse: .*neither text"):
            read(path)


def test_what_is_no_serving_trace(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": '{"hash_ids": [1], "input_length": 3, "requests": []}'}]}
    for path in (write(tmp_path / "chat.jsonl", chat), write(tmp_path / "e"), tmp_path, tmp_path / "none"):
        assert recognize_blocks(path) is None
        with pytest.raises(TraceError, match="no serving trace; Mooncake's, WEKA's and Azure's formats are recognised"):
            read_blocks(path)
    # And a serving trace is no trace of texts.
    for line, name in ((mooncake([1]), "Mooncake"), (weka("one"), "WEKA"), (AZURE, "Azure")):
        with pytest.raises(TraceError, match=rf"t: a serving trace \({name}\): it has no text"):
            load(write(tmp_path / "t", line))


MOONCAKE, WEKA = mooncake([1]), weka("one", weka_request(0, [1, 2]))


@pytest.mark.parametrize(
    ("first", "line", "message"),
    [
        (MOONCAKE, mooncake([1, 2], 3000), r"2 blocks of 512 tokens do not fit a prompt of 3000 tokens"),
        (MOONCAKE, {"timestamp": 1}, r"not a Mooncake request: .*input_length"),
        (WEKA, weka("x", {"t": 0, "in": 64}), r"requests\[0\] lacks `in`, or both `hash_ranges` and `hash_ids`"),
        (WEKA, weka("x", weka_request(0, [3, 1])), r"requests\[0\] has the range \[3, 1\]; half-open"),
        (WEKA, {**weka("x"), "block_size": 0}, r"block_size=0: must be 1 or more"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, first: object, line: object, message: str) -> None:
    with pytest.raises(TraceError, match=rf"t:2: {message}"):
        prefix_census(write(tmp_path / "t", first, line))
