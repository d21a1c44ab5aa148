"""Windows of simulated time and trends over them; many servers, and what the policies make them compute."""

from __future__ import annotations

import argparse
import json

import msgspec
import numpy as np
import pytest
from census_fakes import CONFIG, Ids, IdsEncoder, session
from pic_bench.simulate.command import add_arguments, run
from pic_bench.simulate.lasting import Lasting, Setup, Trends, Window, pace_calls, simulate_lasting
from pic_bench.simulate.store import LEAST_LOADED, Store, StoreCache
from pic_bench.simulate.table import render
from pic_bench.simulate.trend import fit_trend
from pic_replay.pace import Pace
from pic_traces.session import Session

from sglang_pic.census.outcome import CallRef, Outcome
from sglang_pic.cli import main
from sglang_pic.errors import ConfigError


def _sessions(num: int, seed: int) -> list[tuple[str, Session]]:
    """Each session sends one text of its own again and again, behind another header."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(num):
        text = rng.integers(2, 5000, 200).tolist()
        calls = [([rng.integers(2, 5000, 80).tolist(), text, [7, 7]], [9]) for _ in range(6)]
        made.append(("f", session(f"s{number}", calls)))
    return made


def _simulate(
    sessions: list[tuple[str, Session]],
    pool_share: float,
    host_share: float = 0.0,
    *,
    servers: int = 1,
    has_store: bool = False,
) -> Lasting:
    setup = Setup(Pace(3600.0, 20.0, 1), 300.0, pool_share, host_share, servers, has_store)
    *_, result = simulate_lasting(sessions, IdsEncoder(), CONFIG, setup)
    return result


def test_calls_come_in_order_of_time_and_sessions_keep_theirs() -> None:
    sessions = _sessions(8, 3)
    paced = list(pace_calls(sessions, Pace(100.0, 30.0, 2)))
    assert [call.at_s for call in paced] == sorted(call.at_s for call in paced)
    for number in range(8):
        assert [each.call.index for each in paced if each.call.session_id == f"s{number}"] == list(range(6))
    assert list(pace_calls(sessions, Pace(100.0, 30.0, 2))) == paced
    assert [p.at_s for p in pace_calls(sessions, Pace(100.0, 30.0, 3))] != [p.at_s for p in paced]


def test_a_pool_for_everything_keeps_everything_and_a_small_one_less() -> None:
    sessions = _sessions(40, 4)
    whole, small = _simulate(sessions, 1.0), _simulate(sessions, 0.02)
    for window in whole.windows:
        assert window.prefix_tokens == window.unlimited_prefix_tokens
        assert window.chunk_tokens == window.unlimited_chunk_tokens
    assert small.pool_tokens == round(0.02 * whole.distinct_tokens)
    assert sum(w.calls for w in small.windows) == sum(w.calls for w in whole.windows) > 150
    assert sum(w.unlimited_chunk_tokens - w.chunk_tokens for w in small.windows) > 0
    assert whole.trends.kept.change.value == 0


def test_what_left_the_pool_serves_from_a_host() -> None:
    sessions = _sessions(40, 4)
    both, larger = _simulate(sessions, 0.02, 0.2), _simulate(sessions, 0.2)
    for window, other in zip(both.windows, larger.windows, strict=True):
        assert (window.host_prefix_tokens, window.host_chunk_tokens) == (other.prefix_tokens, other.chunk_tokens)
    assert both.host_tokens == larger.pool_tokens > 9 * both.pool_tokens
    assert render(both).count("With a host of") == 1


def test_a_store_adds_nothing_to_a_server_that_keeps_everything() -> None:
    result = _simulate(_sessions(10, 4), 1.0, has_store=True)
    for window in result.windows:
        assert window.store_stock_tokens == window.store_prefix_tokens == window.prefix_tokens
        assert window.store_chunk_tokens == window.chunk_tokens
        assert window.store_loaded_tokens == 0


def test_servers_lose_what_others_have_and_a_store_gives_it_back() -> None:
    """Sessions that append: with a store stock SGLang serves all but the last page, or what is too short to load."""
    rng = np.random.default_rng(6)
    sessions = []
    for number in range(30):
        texts = [rng.integers(2, 5000, 400).tolist() for _ in range(6)]
        sessions.append(("f", session(f"s{number}", [(texts[: end + 1], [9]) for end in range(6)])))
    one, four = _simulate(sessions, 1.0), _simulate(sessions, 1.0, servers=4, has_store=True)
    for window, alone in zip(four.windows, one.windows, strict=True):
        assert window.prompt_tokens == alone.prompt_tokens
        assert 0 <= alone.prefix_tokens - window.store_stock_tokens <= LEAST_LOADED * window.calls
        # Nothing is spliced, so this cache writes all rows, too.
        assert window.store_prefix_tokens == window.store_stock_tokens
        assert window.store_loaded_tokens <= window.store_prefix_tokens + window.calls
    assert all(window.store_loaded_tokens for window in four.windows)
    whole = sum(alone.prefix_tokens for alone in one.windows)
    assert sum(window.prefix_tokens for window in four.windows) < 0.7 * whole


def test_text_of_another_server_is_spliced_and_spliced_rows_are_a_prefix_only() -> None:
    rng = np.random.default_rng(7)
    first, second, text = (rng.integers(2, 5000, length).tolist() for length in (96, 80, 1000))
    store = Store(CONFIG, IdsEncoder.delimiters)

    def serve(number: int, messages: list[Ids]) -> tuple[Outcome, int]:
        """By a fresh server: what it serves, and how much it loads for that."""
        cache = StoreCache(CONFIG, IdsEncoder(), 100_000, store)
        (call,) = session(f"s{number}", [([*messages, [7, 7]], [9])]).calls()
        outcome = cache.serve(CallRef(number, "f", call.session_id, 0), None, IdsEncoder().encode(call))
        return outcome, cache.num_loaded

    computed, num_loaded = serve(0, [first, text])
    assert (computed.prefix_len, computed.num_chunk_hit, num_loaded) == (0, 0, 0)
    again, num_loaded = serve(1, [first, text])
    assert (again.prefix_len, num_loaded) == (1088, 1088), "1,098 tokens in pages of 16"
    moved, num_loaded = serve(2, [second, text])
    assert moved.prefix_len == 0
    assert moved.num_chunk_hit > 900
    assert num_loaded == 1088, "the path that holds the text, from its root"
    # What was spliced there is a prefix for the next one, and the text's donor is still where it was computed. As on a
    # server text is looked up at arrival, when the prefix has not come yet: both are loaded.
    again, num_loaded = serve(3, [second, text])
    assert (again.prefix_len, again.num_chunk_hit, num_loaded) == (1072, 0, 1072 + 1088)
    third, num_loaded = serve(4, [text[:40], second, text])
    assert third.num_chunk_hit > 900
    assert num_loaded == 1088


def test_pool_host_and_store_are_told_apart_and_sum_up_behind_the_warm_up() -> None:
    store = {"stock": 450, "prefix": 300, "chunk": 250, "loaded": 700}
    counted = Window(
        **{"calls": 1, "prompt_tokens": 1000, "prefix_tokens": 100, "chunk_tokens": 50},
        **{"host_prefix_tokens": 180, "host_chunk_tokens": 60},
        **{f"store_{name}_tokens": number for name, number in store.items()},
    )
    result = Lasting(
        **{"hours": 1, "pause_s": 0, "seed": 1, "sessions": 1, "servers": 4, "has_store": True, "window_s": 600},
        **{"distinct_tokens": 9000, "pool_tokens": 900, "host_tokens": 1800},
        windows=[Window(calls=1, prompt_tokens=5000), counted],
        warmup_windows=1,
        trends=Trends(recovered=None, kept=None),
    )

    def rows(**other: bool | int) -> list[list[str]]:
        lines = render(msgspec.structs.replace(result, **other)).splitlines()
        return [line.split()[2:] for line in lines if line.startswith(("stock SGLang", "this cache"))]

    assert rows() == [["10.0%", "8.0%", "27.0%", "55.0%"], ["15.0%", "9.0%", "31.0%", "45.0%"]]
    assert rows(has_store=False) == [["10.0%", "8.0%", "82.0%"], ["15.0%", "9.0%", "76.0%"]]
    assert rows(host_tokens=0) == [["10.0%", "35.0%", "55.0%"], ["15.0%", "40.0%", "45.0%"]]
    assert rows(has_store=False, host_tokens=0) == []
    assert "this cache loads 700" in render(result)


def test_a_share_that_falls_is_told_from_one_that_does_not() -> None:
    rng = np.random.default_rng(5)
    wholes = rng.integers(500, 1500, 36).tolist()
    level = [round(whole * (0.4 + rng.normal(0, 0.05))) for whole in wholes]
    falling = [round(part * (1 - 0.01 * number)) for number, part in enumerate(level)]
    flat, trend = fit_trend(level, wholes, 600.0), fit_trend(falling, wholes, 600.0)
    assert not flat.decays
    assert trend.decays
    assert trend.slope_per_hour.high < 0
    assert trend.change.high < 0
    assert fit_trend([1, 1, 1, 0], [2, 2, 2, 0], 600.0) is None


def test_the_command_prints_windows_and_trends(capsys: pytest.CaptureFixture[str]) -> None:
    trace = "gen:agent_meta?header=50&calls=4&sessions=30&body=300"
    words = ["simulate", trace, "--hours", "0.1", "--windows", "0.25", "--pause-s", "3", "--pool-share", "0.2"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["windows"]) == 24
    assert 0 < result["pool_tokens"] <= result["distinct_tokens"] // 5 + 1
    assert main(words) == 0
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "30 sessions start within 0.1 h and pause 3 s between calls" in printed
    assert printed.count("points an hour") == 2
    assert main([*words, "--servers", "2", "--store", "--limit-sessions", "9"]) == 0
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "each call on one of 2 servers" in printed
    assert "With a store, from which this cache loads" in printed
    assert main([*words, "--limit-sessions", "1"]) == 0
    assert "recovered: too few windows with calls for a trend" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hours 1 --windows 20", r"--hours=1\.0: must hold 5 or more windows of 20 minutes"),
        ("--hours 1 --host-share 0.05", r"--host-share=0\.05: must be at least --pool-share=0\.1"),
        ("--hours 1 --pause-s -1", r"--pause-s=-1\.0: must be 0 or more seconds"),
    ],
)
def test_bad_values_are_refused(words: str, message: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match=message):
        run(parser.parse_args(["sample:agents", *words.split()]))
