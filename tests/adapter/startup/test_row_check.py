"""The start-up checks of real rows through SGLang's own batch: what the runner is asked for, what is left, and what a
runner that does not compute gap batches is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pic.adapter.startup import certified
from sglang_pic.adapter.startup.row_check import check_rows
from sglang_pic.config import PicConfig
from sglang_pic.core import PRESETS, CoreConfig
from sglang_pic.errors import ContractError, UnsupportedError
from sglang_pic.runtime.splice import Splicer
from tests.helpers.certificates import SERVED, put
from tests.helpers.processes import on_each_rank
from tests.helpers.row_runner import Runner, geometry_of

pytestmark = pytest.mark.usefixtures("no_groups")


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("max_sequences", [2, 48])
def test_passes_and_leaves_nothing_behind(page_size: int, max_sequences: int) -> None:
    runner = Runner(page_size)
    everything = [*runner.buffers, runner.req_to_token_pool.req_to_token]
    before = [buffer.clone() for buffer in everything]
    errors, gaps = check_rows(runner, runner.splicer(), max_sequences, None)
    assert errors.first_keys < 5e-3
    assert errors.unmoved_keys > 0.5
    assert (gaps.first < 5e-3, gaps.unread < 0.1) == (True, True)
    # Moved rows, then a gap batch, its donors and the same in full with the right tokens and with wrong ones.
    assert runner.positions == [0, 1, 17, 1_000, 8_000, 8_000, 0, 8_000, 0, 0]
    assert all(map(torch.equal, everything, before))


def refuses(
    runner: Runner, match: str, error: type[Exception] = ContractError, *, splicer: Splicer | None = None
) -> None:
    """The checks stop with that line."""
    with pytest.raises(error, match=match):
        check_rows(runner, splicer or runner.splicer(), 48, None)


def test_a_wrong_rotation_stops_and_leaves_nothing_behind() -> None:
    runner = Runner()
    geometry, before = geometry_of(runner), runner.buffers[0].clone()
    params = tuple(dataclasses.replace(rope, inv_freq=rope.inv_freq * 1.02) for rope in geometry.params)
    refuses(runner, r"^layer 0: keys moved by", splicer=runner.splicer(dataclasses.replace(geometry, params=params)))
    assert torch.equal(runner.buffers[0], before)
    assert not runner.req_to_token_pool.req_to_token.any()


@pytest.mark.parametrize(
    ("broken", "value", "match", "error"),
    [
        # It computes the whole batch from the tokens that it is given, and nothing else shows that no row was moved.
        ("path", None, r"^layer 0: rows of a gap batch .* does not execute splices", ContractError),
        ("path.move_rows", lambda gap: gap.locks.close(), r"^layer 0: rows of a gap batch .* L2 of inf", ContractError),
        # The rows of the first layer are right: they depend on their own tokens.
        ("reads_prefix", False, r"backend 'by hand' .*tokens after a splice do not read its rows", UnsupportedError),
    ],
)
def test_a_pass_that_does_not_splice_move_or_read_stops(
    broken: str, value: object, match: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner()
    splicer = runner.splicer()
    owner, _, name = broken.rpartition(".")
    monkeypatch.setattr(getattr(runner, owner) if owner else runner, name, value)
    refuses(runner, match, error, splicer=splicer)


def test_logits_of_every_gap_instead_of_every_request_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    logits = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=torch.zeros(3, 4)))
    compute = runner.compute
    monkeypatch.setattr(runner, "compute", lambda batch: (compute(batch), logits)[1])
    refuses(runner, r"a batch of 1 requests gave 3 rows of logits")


def test_a_pool_too_small_says_how_large_it_must_be() -> None:
    runner = Runner(page_size=64, size=128)
    refuses(runner, r"KV pool of 128 tokens .*--max-total-tokens 192 or more", UnsupportedError)


def test_without_a_certificate_nothing_is_read_or_said() -> None:
    assert certified.certify(None, PicConfig(), None, None) is None


def serve(rank: int, group: Any, certificate: Path) -> str:
    """Start one rank of a server whose ranks may have certificates of their own."""
    certified.read_weights = lambda *_: SERVED.weights
    context = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(prefill_attention_backend_str="fa3")),
        server_args=SimpleNamespace(model_path="/models/smollm2"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        params=SimpleNamespace(page_size=1),
        **{"tp_group": group, "tp_rank": rank},
    )
    splicer: Any = SimpleNamespace(view=SimpleNamespace(dtype=torch.bfloat16))
    config = PicConfig(core=CoreConfig(**PRESETS["balanced"]), certificate=str(certificate))
    return f"fits: {certified.certify(context, config, splicer, None).fits}"


def test_ranks_read_the_same_certificate_or_stop(tmp_path: Path) -> None:
    path = put(tmp_path / "certificate.json", "balanced")
    alike = on_each_rank(2, tmp_path / "store", lambda rank, group: serve(rank, group, path))
    assert alike == ["fits: True"] * 2
    paths = [path, tmp_path / "none.json"]
    (answer,) = {*on_each_rank(2, tmp_path / "store2", lambda rank, group: serve(rank, group, paths[rank]))}
    assert answer.startswith("UnsupportedError: tensor-parallel ranks [1] and rank 0 read different certificates,")
