"""States of hybrid models at places of our choice: what SGLang is asked for, and what is counted."""

from __future__ import annotations

import json
import logging
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.arg_groups import overrides
from sglang.srt.configs import linear_attn_model_registry as registry
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_pic.adapter.features import state_checkpoints
from sglang_pic.adapter.features.state_checkpoints import EVENTS, METRICS, StateCheckpoints
from sglang_pic.adapter.metrics import Series
from sglang_pic.census.state_config import NO_BUFFER_ARCHITECTURES, state_rules
from sglang_pic.checkpoints import Checkpoints, _names
from sglang_pic.core import Tokens
from sglang_pic.errors import ContractError
from tests.helpers.builders import Kept

GRID = 64


class Cache:
    """SGLang's choice for one pass a prompt: rows of all prompts, and of each the state that its pass kept."""

    def __init__(self, states: StateCheckpoints) -> None:
        self.states, self.rows, self.kept = states, list[list[int]](), set[tuple[int, ...]]()

    def serve(self, prompt: list[int], **members: Any) -> tuple[int, int | None]:
        """Where the prompt went on from, and where its state was kept."""
        kept = [len(state) for state in self.kept if tuple(prompt[: len(state)]) == state]
        req: Any = SimpleNamespace(
            origin_input_ids=array("q", prompt),
            prefix_len=max(kept, default=0),
            extend_end=len(prompt),
            mamba_branching_seqlen=None,
            skip_radix_cache_insert=False,
            session=None,
            extra_key=None,
            cache_salt=None,
            kv=SimpleNamespace(mamba_last_track_seqlen=None),
        )
        vars(req).update(members)
        shared = max((np.argmin([*map(int.__eq__, prompt, rows), False]) for rows in self.rows), default=0)
        if (branch := int(shared) // GRID * GRID) > req.prefix_len:
            req.mamba_branching_seqlen = branch
        self.states.track(self.track, None, req)
        self.rows.append(prompt)
        return req.prefix_len, req.kv.mamba_last_track_seqlen

    def track(self, _batch: object, req: Any) -> None:
        place = req.mamba_branching_seqlen
        if req.extend_end - req.prefix_len >= GRID:
            end = req.extend_end - (req.extend_end - req.prefix_len) % GRID
            kept = place if place is not None and req.prefix_len < place < req.extend_end else end
            req.kv.mamba_last_track_seqlen = kept
            self.kept.add(tuple(req.origin_input_ids[:kept]))


def made(places: Any = None, series: Series | None = None) -> Cache:
    return Cache(StateCheckpoints(places or Checkpoints(GRID, 8192), GRID, series or Series(METRICS, None)))


def drawn(seed: int, num_tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 40_000, num_tokens).tolist()


HEAD = drawn(0, 500)


def prompt_behind(clock: int, task: int) -> list[int]:
    return [*drawn(100 + clock, 76), *HEAD, *drawn(1000 + task, 150)]


def test_a_state_is_kept_where_the_first_prompt_behind_a_new_clock_will_be_left(registry: Any) -> None:
    """SGLang's own rule keeps it with the second one, which is computed as a whole again."""
    cache = made(series=Series(METRICS, {"model_name": "m"}))
    found = [[cache.serve(prompt_behind(clock, 10 * clock + task)) for task in range(3)] for clock in range(3)]
    first = [(0, 704), (0, 576), (576, 704)]
    assert found == [first, [(0, 576), (576, 704), (576, 704)], [(0, 576), (576, 704), (576, 704)]]
    for event, count in {"asked": 2, "kept": 2, "hit": 4, "fault": 0}.items():
        labels = {"model_name": "m", "event": event}
        assert registry.get_sample_value("sglang:pic_state_checkpoints_total", labels) == count


def test_a_prompt_is_learnt_from_once_over_all_its_passes() -> None:
    """Also after a retraction, when SGLang matches it again and chooses for itself."""
    prompts = list[int]()

    def choose(prompt: Any, *_: object) -> int:
        prompts.append(len(prompt))
        return 128

    series = Kept()
    cache = made(SimpleNamespace(choose=choose), series)
    req: Any = None

    def passes(_batch: object, given: Any) -> None:
        nonlocal req
        req = given
        req.kv.mamba_last_track_seqlen = 64 if req.extend_end == 100 else req.mamba_branching_seqlen

    cache.track = passes  # type: ignore[method-assign]
    cache.serve(HEAD, extend_end=100)
    assert series.by_label(EVENTS) == {"asked": 1}
    req.prefix_len, req.extend_end = 100, 200
    cache.states.track(passes, None, req)
    req.mamba_branching_seqlen, req.prefix_len = 192, 0
    cache.states.track(passes, None, req)
    assert prompts == [len(HEAD)]
    assert series.by_label(EVENTS) == {"asked": 1, "kept": 1}
    assert req.kv.mamba_last_track_seqlen == 192


def test_after_an_exception_sglang_alone_chooses(caplog: pytest.LogCaptureFixture) -> None:
    series = Kept()
    cache = made(series=series)
    for task in range(3):
        cache.serve(prompt_behind(0, task))
    with caplog.at_level(logging.ERROR):
        assert cache.serve(prompt_behind(1, 3), origin_input_ids=["no token"] * 80) == (0, 704)
    assert cache.serve(prompt_behind(2, 4)) == (0, 704)
    assert series.by_label(EVENTS)["fault"] == 1
    assert [each.message for each in caplog.records] == [
        "sglang_pic: SGLang alone chooses where states are kept from here on"
    ]


@pytest.mark.parametrize(("strategy", "chunk", "is_on"), [("no_buffer", 512, False), ("extra_buffer", -1, True)])
def test_the_hook_is_there_where_states_are_kept_in_an_extra_buffer(
    monkeypatch: pytest.MonkeyPatch, strategy: str, chunk: int, is_on: bool
) -> None:
    hooks = list[str]()
    mamba = SimpleNamespace(enable_mamba_extra_buffer=strategy == "extra_buffer")
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(mamba=mamba))
    monkeypatch.setattr("sglang.srt.runtime_context.mamba_checkpoint_grid", lambda page: 64 * page)
    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=4096)
    monkeypatch.setattr(state_checkpoints, "get_schedule", lambda: schedule)
    monkeypatch.setattr(state_checkpoints, "hook", lambda _owner, name, _function: hooks.append(name))
    ctx: Any = SimpleNamespace(tp_rank=0, params=SimpleNamespace(page_size=2))
    assert (state_checkpoints.install(ctx, None) is not None) == is_on
    assert hooks == ["_mamba_radix_cache_v2_req_prepare_for_extend"] * is_on


def test_another_sglang_serves_without_checkpoints(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> list[str]:
        raise ContractError("a function is missing")

    monkeypatch.setattr(state_checkpoints, "check_contract", refuse)
    ctx: Any = SimpleNamespace(tp_rank=0)
    assert state_checkpoints.install(ctx, None) is None
    assert caplog.messages == [
        "sglang_pic: states of recurrent layers are kept as without the plugin: a function is missing"
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "nemotron_h"},
        {"model_type": "nemotron_h", "chunk_size": 128},
        {"model_type": "nemotron_h", "chunk_size": 128, "mamba_chunk_size": 64},
        {"model_type": "mamba2", "chunk_size": 128},
        {"model_type": "granitemoehybrid", "mamba_chunk_size": 128},
        *({"model_type": kind} for kind in ("falcon_h1", "granitemoehybrid", "mamba2", "mamba", "falcon_mamba")),
        *({"model_type": kind} for kind in ("lfm2", "lfm2_moe", "lfm2_vl", "zaya", "llama")),
        *({"model_type": kind} for kind in ("qwen3_next", "qwen3_5_moe", "kimi_linear", "jet_nemotron", "glm5_next")),
    ],
    ids=str,
)
def test_the_chunk_is_sglangs(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    # As in `mamba_cache_chunk_size`.
    expected = getattr(get_config(str(tmp_path), trust_remote_code=False), "mamba_chunk_size", 64)
    assert state_rules(tmp_path).mamba_chunk_size == expected


def test_models_without_extra_buffers_are_sglangs() -> None:
    named = overrides._MAMBA_RADIX_CACHE_ARCHS - overrides._MAMBA_EXTRA_BUFFER_ARCHS
    specs = [each for each in registry._LINEAR_ATTN_MODEL_REGISTRY if each.uses_mamba_radix_cache]
    assert all(each.arch_names for each in specs), "one that is found by its configuration has no place in the list"
    found = {name for each in specs if not each.support_mamba_cache_extra_buffer for name in each.arch_names}
    assert named | found == NO_BUFFER_ARCHITECTURES


CHUNK = 8192


def words(seed: int, count: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 49_152, count).astype(np.int32)


WORDS, LAST_WORDS = words(1, 2000), words(2, 300)


def words_behind(clock: int, task: int) -> Tokens:
    return np.concatenate([words(clock, 20), WORDS, words(task, 1500)])


def test_words_have_one_name_wherever_they_stand() -> None:
    assert np.array_equal(_names(np.concatenate([words(3, 77), WORDS]))[77:], _names(WORDS))
    assert len(np.unique(_names(WORDS))) == len(WORDS) - 31


def test_a_place_is_known_behind_another_clock_before_any_prompt_parts_there() -> None:
    checkpoints = Checkpoints(GRID, CHUNK)
    assert [checkpoints.choose(words_behind(30, task), 0, None) for task in (40, 41)] == [None, 1984]
    fork = 2020 - 2020 % GRID
    assert checkpoints.choose(words_behind(31, 42), 0, None) == fork
    assert checkpoints.choose(words_behind(31, 43), fork, None) is None
    assert checkpoints.choose(words_behind(32, 44), 0, None, namespace=7) is None


def test_the_next_turn_leaves_a_prompt_as_the_one_before() -> None:
    """Each turn is put in front of the same last words, where a state would be of no use."""
    checkpoints, turns, places = Checkpoints(GRID, CHUNK), words(5, 3000), []
    for turn in range(4):
        prompt = np.concatenate([turns[: 500 * (turn + 1)], LAST_WORDS])
        places.append(checkpoints.choose(prompt, 448 * turn, None))
    assert places[2:] == [1500 - 1500 % GRID, 2000 - 2000 % GRID]


def test_a_state_at_the_end_stays_where_the_next_turn_goes_on_from_there() -> None:
    checkpoints, whole = Checkpoints(GRID, CHUNK), words(6, 6000)
    assert [checkpoints.choose(whole[: 1000 * turn], 960 * (turn - 1), None) for turn in range(1, 6)] == [None] * 5
    # A fork near the beginning is worth less than the end.
    other = np.concatenate([whole[:200], words(7, 5000)])
    assert checkpoints.choose(other, 0, None) is None
    assert checkpoints.choose(other[:5000], 0, 192) == 192, "SGLang's own choice stands where nothing pays more"
