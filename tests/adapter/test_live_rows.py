"""The start-up checks of real rows through SGLang's own batch: what the runner is asked for, what is left, and what a
runner that does not compute gap batches is told."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import factory
from torch import nn

from sglang_pic.adapter.serve.forward import ForwardPath
from sglang_pic.adapter.startup.row_check import check_rows
from sglang_pic.errors import ContractError, UnsupportedError
from sglang_pic.runtime import RopeGeometry, read_geometry, view_pool
from sglang_pic.runtime.splice import Splicer
from tests.adapter.builders import BareRunner, make_pool
from tests.unit.rope_models import RadixAttention

pytestmark = pytest.mark.usefixtures("no_groups")


class Runner(BareRunner):
    """SGLang's model runner with two layers of attention that follows the page table, a splice path around it."""

    prefill_attention_backend_str = "by hand"
    is_draft_worker = False

    def __init__(self, page_size: int = 1, size: int = 256) -> None:
        super().__init__(64)
        self.token_to_kv_pool = pool = make_pool("mha", size=size, page_size=page_size, layer_num=2)
        self.buffers = [*pool.k_buffer, *pool.v_buffer]
        self.rotary = factory.get_rope(64, 64, 9_000, 10_000, True, None, dtype=torch.float32)
        self.embedding = torch.randn((1_000, 2, 64), generator=torch.Generator().manual_seed(0))
        self.model = nn.ModuleList(
            nn.ModuleDict({"rotary_emb": self.rotary, "attn": RadixAttention(layer)}) for layer in range(2)
        )
        self.positions: list[int] = []
        self.path: ForwardPath | None = None
        self.reads_prefix = True

    def forward(self, batch: Any) -> Any:
        if self.path is None:
            return self.compute(batch)
        return self.path._forward(lambda _, batch: self.compute(batch), self, batch)  # type: ignore[arg-type]

    def compute(self, batch: Any) -> Any:
        """Write the rows of both layers; the second one's come from the first one's attention."""
        table, slots, pool = self.req_to_token_pool.req_to_token, batch.out_cache_loc, self.token_to_kv_pool
        self.positions.append(int(batch.positions[0]))
        hidden = self.embed(batch)
        for layer in range(2):
            _, keys = self.rotary.forward_native(batch.positions, hidden.clone(), hidden.clone())
            queries, keys = keys.view_as(hidden), keys.view_as(hidden)
            pool.k_buffer[layer][slots], pool.v_buffer[layer][slots] = keys.bfloat16(), hidden.bfloat16()
            read, first = [], 0
            sequences = batch.req_pool_indices, batch.extend_prefix_lens, batch.extend_seq_lens
            for row, prefix, new in zip(*(each.tolist() for each in sequences), strict=True):
                seen = table[row, : prefix + new].long()
                written = slots[first : first + new].tolist()
                assert seen[prefix:].tolist() == written, "the page table names what is written"
                k, v = pool.k_buffer[layer][seen].float(), pool.v_buffer[layer][seen].float()
                mask = torch.full((new, prefix + new), -torch.inf).triu(prefix + 1)
                if not self.reads_prefix:
                    mask[:, :prefix] = -torch.inf
                scores = torch.einsum("qhd,khd->hqk", queries[first : first + new], k) / 8 + mask
                read.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
                first += new
            hidden = hidden + torch.cat(read)
        logits = torch.zeros(batch.batch_size if self.path is None else 1, 4)
        outputs = {"next_token_logits": logits, "hidden_states": hidden, "mm_input_embeds": batch.mm_input_embeds}
        return SimpleNamespace(logits_output=SimpleNamespace(**outputs))

    def embed(self, batch: Any) -> torch.Tensor:
        """`[num_tokens, 2, 64]`."""
        return self.embedding[batch.input_ids]

    def splicer(self, geometry: RopeGeometry | None = None) -> Splicer:
        """As a server has it, in the path of its forward passes."""
        splicer = Splicer(view_pool(self.token_to_kv_pool), geometry or geometry_of(self))
        self.path = ForwardPath(splicer)
        return splicer


def geometry_of(runner: Runner) -> RopeGeometry:
    return read_geometry(runner.model, max_shift=8_192)


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
