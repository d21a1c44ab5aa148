"""Prefill and decode on servers of their own, where rows are of several kinds, in several pools, or on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import pd_plugin
from tests.e2e.pairs import a_pair, assert_arrived, torch_equal
from tests.e2e.servers import on_each_server
from tests.e2e.serving import Client, assert_same, random_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.feature("PD disaggregation")]


@on_each_server("dsa_page64", "gpt_oss_page16", "minimax_page16")
def test_index_keys_and_windows_arrive(
    client: Client, servers: tuple[str], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """With spliced rows too, in prompts that end with a run, and answers are those of one server."""
    donor, fresh = random_tokens(1, 500), random_tokens(2, 200)
    # Of a prompt whose answer stands elsewhere the prefill server keeps whole pages.
    prompts = [donor, [*fresh[:40], *donor[40:420]], [*fresh[50:190], *donor[30:440], fresh[0]]]
    answers = [client.generate(prompt, max_new_tokens=40) for prompt in prompts]
    with a_pair(servers[0], model_dir, tmp_path, pd_plugin.STAND_IN) as pair:
        for prompt, alone in zip(prompts, answers, strict=True):
            answer, rows = pair.generate(prompt, max_new_tokens=40)
            assert_arrived(rows)
            assert_same(alone, answer)
            assert answer.chunk_hit_tokens == alone.chunk_hit_tokens
            assert (answer.chunk_hit_tokens > 200) == (prompt is not donor)


@pytest.mark.feature("HiCache with PD disaggregation")
def test_rows_that_a_prefill_server_fetched_from_the_host_arrive(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Those that are sent are, bit for bit, the ones that were spliced from the device."""
    host = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "3072")
    donor = random_tokens(41, 400)
    moved = [*random_tokens(42, 40), *donor[40:], *random_tokens(43, 230)]
    with a_pair("gqa_page16", model_dir, tmp_path, pd_plugin.STAND_IN, prefill_flags=host) as pair:
        sent = []
        for on_host in (False, True):
            pair.prefill.flush()
            pair.generate(donor, max_new_tokens=1)
            for number in range(7 if on_host else 0):
                pair.generate(random_tokens(50 + number, 600), max_new_tokens=1)
            before = pair.prefill.counters()
            answer, rows = pair.generate(moved)
            fetched = pair.prefill.grown(before)["fetched_tokens"]
            assert answer.chunk_hit_tokens > 250
            assert fetched == (answer.chunk_hit_tokens if on_host else 0)
            assert_arrived(rows)
            sent.append(rows["sent"]["rows"])
        assert torch_equal(*({"received": {"rows": rows}} for rows in sent))
