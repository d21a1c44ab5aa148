"""The patched server beside stock SGLang: `off` is stock, and the comparison that users run ends with its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from sglang_pic.cli import main
from tests.e2e.servers import SERVERS, on_servers
from tests.e2e.serving import Client, assert_nothing_runs, killed_once_it_records, random_tokens, serve

pytestmark = pytest.mark.e2e


@on_servers("gqa_page16")
def test_off_gives_the_tokens_of_stock(
    model_dir: Callable[[str], Path], tmp_path: Path, client_of: Callable[[str], Client]
) -> None:
    """The same prompts one at a time, some sharing a prefix, some sharing text at another position; between them the
    same prompts are spliced, before and after, with every policy."""
    base = random_tokens(0, 160)
    prompts = [[*random_tokens(i, 20), *base] for i in range(5)] + [
        [*base, *random_tokens(50 + i, 30)] for i in range(5)
    ]
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        server = serve(model_dir("tiny-gqa"), tmp_path, *SERVERS["gqa_page16"].args, backend=None)
        starting = pool.submit(stack.enter_context, server)
        client = client_of("gqa_page16")
        stock = starting.result()
        expected = [stock.generate(prompt, max_new_tokens=6) for prompt in prompts]
    answers, spliced = [], []
    for i, prompt in enumerate(prompts):
        policy = {"edit": ("notes", "in_place", "recompile")[i % 3]}
        spliced.append(client.generate(prompt, max_new_tokens=1))
        answers.append(client.generate(prompt, pic={"mode": "off"}, max_new_tokens=6))
        spliced.append(client.generate(prompt, pic=policy, max_new_tokens=1))
    assert sum(answer.chunk_hit_tokens for answer in spliced) > 300
    assert [a.ids for a in answers] == [a.ids for a in expected]
    assert [a.first_token for a in answers] == [a.first_token for a in expected]
    assert [a.cached_tokens for a in answers] == [a.cached_tokens for a in expected]


@pytest.mark.usefixtures("quick_servers")
def test_compare_ends_with_a_report(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Fresh servers, a real replay, and a summary whose sums agree, on a small early-divergence workload."""
    out = tmp_path / "run"
    trace = "gen:agent_meta?header=50&body=1400&calls=3&sessions=2&seed=3"
    code = main(
        [
            *("compare", trace, "--model", str(model_dir("tiny-gqa")), "--out", str(out), "--max-tokens", "2"),
            *("--", "--max-total-tokens", "24000"),
        ]
    )
    assert code == 0
    summary = json.loads((out / "summary.json").read_text())
    stock, pic = summary["arms"]["stock"], summary["arms"]["pic"]
    for arm in (stock, pic):
        assert arm["requests"] == 6
        assert arm["failed"] == arm["skipped"] == 0
        tokens = (arm["prefix_hit_tokens"], arm["chunk_hit_tokens"], arm["computed_tokens"])
        assert sum(tokens) == arm["prompt_tokens"]
    assert stock["prompt_tokens"] == pic["prompt_tokens"]
    assert stock["chunk_hit_tokens"] == 0
    assert pic["computed_tokens"] < 0.6 * stock["computed_tokens"]
    page = (out / "report.html").read_text()
    assert "<table" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_servers")
def test_a_comparison_says_so_when_a_rank_is_killed(
    model_dir: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang ends a server that lost a rank; nobody waits for the other one, and nothing is left running."""
    command = [
        *("compare", "gen:agent_meta?calls=30&sessions=30&seed=3", "--model", str(model_dir("tiny-gqa"))),
        *("--out", str(tmp_path / "run"), "--arms", "pic", "--max-tokens", "8"),
        *("--", "--tp-size", "2", "--max-total-tokens", "24000"),
    ]
    with killed_once_it_records(tmp_path, "requests.jsonl", "TP1"):
        assert main(command) == 1
    error = capsys.readouterr().err
    assert "the server was ended" in error or "the server ended" in error
    assert_nothing_runs(error)
