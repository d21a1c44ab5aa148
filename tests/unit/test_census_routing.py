"""Many servers in a census: what the policies make them compute, and how the gateway's chooses."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from sglang_pic.census.command import add_arguments, run
from sglang_pic.census.gateway import BehindHead, CacheAware, Computed, Routing
from sglang_pic.cli import main
from sglang_pic.core import Tokens
from sglang_pic.errors import ConfigError
from sglang_pic.route import Sketched, cut

_WORDS = ["census", "--hours", "0.1", "--servers", "3", "--pause-s", "3"]
_NONE = Sketched(np.zeros(0, np.uint64), np.zeros(0, np.int64), 0)


def _json(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    assert main([*_WORDS, *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    return {each["routing"]: each for each in result["policies"]}


def test_text_behind_a_clock_is_found_by_content_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix never returns, so that the gateway's policies spread every session over all servers."""
    trace = "clock:gen:tool_aging?sessions=9&calls=8&result=200&system=300"
    policies = _json([trace, "--routing", *(routing.value for routing in Routing)], capsys)
    one, content = policies["one"], policies["content"]
    assert one["computed_tokens"] <= content["computed_tokens"] < 1.3 * one["computed_tokens"]
    assert policies["cache_aware"]["computed_tokens"] > 1.5 * content["computed_tokens"]
    assert policies["round_robin"]["computed_tokens"] > 1.5 * content["computed_tokens"]
    assert 1 <= content["busiest_to_mean"] < 1.5
    # A restart costs what the server held.
    restarted = _json([trace, "--routing", "content", "--restart", "0.34"], capsys)["content"]
    assert restarted["second_half_tokens"] > content["second_half_tokens"]
    # So does an eviction, of which servers tell.
    pooled = _json([trace, "--routing", "content", "--pool-tokens", "4000"], capsys)
    assert pooled["one"]["computed_tokens"] > one["computed_tokens"]
    assert pooled["content"]["cached_tokens"] <= 3 * 4000
    assert pooled["content"]["index"]["names"] < content["index"]["names"]
    assert main([*_WORDS, trace, "--routing", "content", "--limit-sessions", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 sessions start within 0.1 h" in printed
    assert "bytes for a million cached tokens" in printed


def test_behind_a_changing_head_prompts_are_alike() -> None:
    policy, rng = BehindHead(2), np.random.default_rng(3)
    body = rng.integers(0, 1000, 1500, dtype=np.int32)
    chosen = []
    for head in range(4):
        tokens = np.concatenate([rng.integers(0, 1000, 200 + 3 * head, dtype=np.int32), body])
        chosen.append(policy.choose(tokens, cut(tokens, b"", b""), 0.0))
    assert len(set(chosen)) == 2, "the first prompt's body was not known"
    assert len(set(chosen[1:])) == 1


def _text(*parts: tuple[int, int]) -> Tokens:
    return np.concatenate([np.arange(first, last, dtype=np.int32) for first, last in parts])


def test_the_gateways_policy_follows_prefixes_then_sizes_then_queues() -> None:
    policy = CacheAware(3)
    assert policy.choose(_text((0, 100)), _NONE, 0.0) == 0
    assert policy.choose(_text((0, 40), (500, 560)), _NONE, 0.0) == 0, "4 in 10 are a prefix"
    assert policy.choose(_text((0, 20), (600, 680)), _NONE, 0.0) == 1, "2 in 10 are not: the smallest tree"
    assert policy.choose(_text((700, 710)), _NONE, 0.0) == 2
    assert policy.choose(_text((800, 900)), _NONE, 0.0) == 2
    for _ in range(64):
        assert policy.choose(_text((0, 100)), _NONE, 0.0) == 0
    assert policy.choose(_text((0, 100)), _NONE, 0.0) == 1, "0 has 65 requests more than it"
    for number in range(10):
        policy.end(Computed(0.0, number, 0, 1, [], []))
    assert policy.choose(_text((0, 100)), _NONE, 0.0) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--routing: needs --hours H"),
        (["--hours", "0"], r"--hours=0\.0: must be more than 0"),
        (["--hours", "1", "--store"], "have no meaning with --routing"),
        (["--hours", "1", "--restart", "1"], r"--restart=1\.0: must be 0 or more, and less than 1"),
        (["--hours", "1", "--pool-tokens", "0"], "--pool-tokens=0: must be 1 or more"),
        (["--hours", "1", "--servers", "0"], "--servers=0: must be 1 or more"),
    ],
)
def test_bad_values_are_refused(words: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match=message):
        run(parser.parse_args(["sample:agents", "--routing", "content", *words]))
