"""The seeded generators: what repeats, what changes, how long it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pic_traces import load
from pic_traces.words import TOKENS_PER_WORD

from sglang_pic.errors import TraceError


def num_words(text: object) -> int:
    return len(str(text).split())


def system_parts(spec: str) -> list[tuple[str, str]]:
    """Header and body of every call's system message."""
    contents = [str(call.messages[0]["content"]) for session in load(spec) for call in session.calls()]
    return [tuple(content.split("\n\n")) for content in contents]  # type: ignore[misc]


@pytest.mark.parametrize("header", [50, 250, 1000, 2000])
def test_agent_meta_changes_the_header_and_keeps_the_body(header: int) -> None:
    parts = system_parts(f"gen:agent_meta?header={header}&body=300&calls=5&sessions=3&seed=7")
    headers = [head for head, _ in parts]
    assert len({head[:20] for head in headers}) == 15
    assert len({body for _, body in parts}) == 1
    lengths = [num_words(head) * TOKENS_PER_WORD for head in headers]
    assert all(0.9 * header - 2 <= length <= 1.1 * header + 2 for length in lengths)
    assert len(set(lengths)) > 1
    assert num_words(parts[0][1]) == round(300 / TOKENS_PER_WORD)


def test_agent_meta_grows_its_history() -> None:
    (session,) = load("gen:agent_meta?calls=3&sessions=1")
    first, second, third = session.calls()
    assert [message["role"] for message in third.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert second.messages[1:3] == [first.messages[1], first.completion]
    assert third.messages[1:4] == second.messages[1:]
    assert third.messages[4] == second.completion


def test_without_jitter_the_header_keeps_its_length() -> None:
    headers = [head for head, _ in system_parts("gen:agent_meta?header=100&jitter=0&body=10&calls=4&sessions=2")]
    assert {num_words(head) for head in headers} == {round(100 / TOKENS_PER_WORD)}


def test_random_text_shares_nothing() -> None:
    calls = [call for session in load("gen:random?prompt=400&sessions=6&calls=2") for call in session.calls()]
    assert len(calls) == 12
    seen: set[tuple[str, ...]] = set()
    for call in calls:
        words = " ".join(str(message["content"]) for message in call.messages).split()
        windows = {tuple(words[i : i + 8]) for i in range(len(words) - 7)}
        assert not windows & seen
        seen |= windows
        assert call.messages[0]["role"] == "system"


def test_the_seed_decides() -> None:
    def everything(spec: str) -> list[object]:
        return [(session.session_id, session.pool) for session in load(spec)]

    for name in ("agent_meta", "random"):
        spec = f"gen:{name}?calls=2&sessions=2"
        assert everything(f"{spec}&seed=5") == everything(f"{spec}&seed=5")
        assert everything(f"{spec}&seed=5") != everything(f"{spec}&seed=6")


@given(size=st.integers(0, 120), seed=st.integers(0, 5))
@settings(max_examples=30)
def test_a_tokenizer_makes_lengths_exact(size: int, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    ((header, body),) = system_parts(
        f"gen:agent_meta?header=30&jitter=0&body={size + 1}&calls=1&sessions=1&seed={seed}&tokenizer={folder}"
    )
    assert len(tokenizer.encode(header).ids) == 30
    assert len(tokenizer.encode(body).ids) == size + 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gen:nothing", "no generator 'nothing'; agent_meta and random are there"),
        ("gen:agent_meta?headers=3", "unknown field `headers`; allowed are header, jitter, body"),
        ("gen:agent_meta?header=many", r"Expected `int`.*header"),
        ("gen:agent_meta?header=-1", "header=-1: must be 0 or more"),
        ("gen:agent_meta?jitter=1.5", r"jitter=1\.5: must be between 0 and 1"),
        ("gen:agent_meta?calls", "options are written key=value"),
        ("gen:random?calls=1&calls=2", "calls is set twice"),
        ("gen:random?sessions=0", "sessions=0: must be 1 or more"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(load(spec))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"tokenizer\.json does not exist; a folder with a tokenizer\.json is expected"
    ):
        list(load(f"gen:random?tokenizer={tmp_path}"))
