"""An audit with what is around it in a server: SGLang's own allocator, and a model of few lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_pic.adapter.features.audit.audit import Audit, is_drawn
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.prompt_pass import STEP_TOKENS
from sglang_pic.config import PicConfig
from tests.helpers.builders import BareRunner, Kept, make_allocator, make_stations, raises, request, request_state

VOCAB, POOL = 50, 4096
PROMPT = [7 * i % 1000 for i in range(2 * STEP_TOKENS + 44)]


class Runner(BareRunner):
    """SGLang's model runner; its logits depend on every token that is read through the page table."""

    def __init__(self) -> None:
        super().__init__(POOL, VOCAB)
        self.rows = torch.zeros(POOL + 64, dtype=torch.int64)
        self.logits = torch.zeros(1, VOCAB)
        """Of the last pass: SGLang's captured graphs write those of every pass to one buffer."""
        self.num_steps = 0

    def forward(self, batch: Any) -> Any:
        """Write the new rows, read the whole sequence."""
        self.num_steps += 1
        self.shared_read_done_event = "of this pass"
        row, seq_len, prefix_len = map(int, (batch.req_pool_indices, batch.seq_lens, batch.extend_prefix_lens))
        table = self.req_to_token_pool.req_to_token[row]
        assert table[prefix_len:seq_len].tolist() == batch.out_cache_loc.tolist()
        assert batch.positions.tolist() == list(range(prefix_len, seq_len))
        assert len(set(table[:seq_len].tolist())) == seq_len, "one slot a token"
        self.rows[batch.out_cache_loc] = batch.input_ids + 1
        self.logits[0] = logits_of((self.rows[table[:seq_len].long()] - 1).tolist())
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=self.logits))


class Tree:
    """The tree as the allocator sees it: some rows that can be evicted."""

    def __init__(self, page_size: int, num_evictable: int) -> None:
        self.token_to_kv_pool_allocator = make_allocator(POOL, page_size)
        self.evictable = self.token_to_kv_pool_allocator.alloc(num_evictable) if num_evictable else torch.empty(0)

    def supports_prefix_sharing(self) -> bool:
        return True

    def supports_swa(self) -> bool:
        return False

    def evictable_size(self) -> int:
        return len(self.evictable)

    def evict_for_alloc(self, params: Any) -> None:
        self.token_to_kv_pool_allocator.free(self.evictable[: params.num_tokens])
        self.evictable = self.evictable[params.num_tokens :]


class Scheduler:
    """What the audit asks of SGLang's scheduler."""

    enable_overlap = True
    device_module = torch.cpu

    def __init__(self) -> None:
        self.forward_stream = self.schedule_stream = torch.cpu.Stream()
        self.forward_stream_ctx = torch.cpu.stream(self.forward_stream)
        self.waiting_queue: list[object] = []
        self.chunked_req: object = None
        self.result_queue: list[tuple[object, Any]] = []
        self.is_idle = True

    def is_fully_idle(self) -> bool:
        return self.is_idle


class Bench:
    """An audit with everything around it."""

    def __init__(
        self, *, page_size: int = 1, num_evictable: int = 0, sends_rows: bool = False, **settings: Any
    ) -> None:
        self.runner, self.scheduler, self.tree = Runner(), Scheduler(), Tree(page_size, num_evictable)
        self.scheduler.tree_cache = self.tree
        self.runner.token_to_kv_pool_allocator = self.tree.token_to_kv_pool_allocator
        self.config = PicConfig(audit_rate=settings.pop("audit_rate", 1.0), **settings)
        self.series = Kept()
        stations = make_stations(config=self.config, series=lambda _: self.series)
        stations.recovery = SimpleNamespace(recover=raises)
        self.audit = Audit(self.runner, stations, None, sends_rows=sends_rows)  # type: ignore[arg-type]

    def serve(
        self,
        logits: torch.Tensor | None = None,
        *,
        tokens: list[int] = PROMPT,
        namespace: str | None = None,
        lora_id: str | None = None,
        **reused: int,
    ) -> bool:
        """A request on spliced rows comes by, with these fields of `RequestState`; whether it was drawn.

        Its logits are those of a full computation, if none are given.
        """
        key, reused = Namespace(namespace), {"chunk_hit": 64, "matched_len": 0, **reused}
        state = request_state(namespace=key, generation=self.audit.ledger.generation(key), **reused)
        req = request(tokens, pic=state, lora_id=lora_id)
        self.audit.on_admitted(req)
        was_drawn = is_drawn(state)
        if (keep := self.audit.watch(SimpleNamespace(reqs=[req]))) is not None:  # type: ignore[arg-type]
            logits = logits_of(tokens) if logits is None else logits
            keep(SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=[logits])))  # type: ignore[arg-type]
        return was_drawn

    def audit_one(self, logits: torch.Tensor | None = None, **request: Any) -> None:
        """A request on spliced rows comes by, and is audited."""
        self.serve(logits, **request)
        self.run()

    def serve_broken(self, namespace: str | None = None) -> None:
        """A short spliced request comes by that is as bad as can be, and is audited."""
        self.serve(torch.full((VOCAB,), float("nan")), tokens=PROMPT[:10], namespace=namespace)
        self.run(3)

    def run(self, rounds: int = 100) -> None:
        for _ in range(rounds):
            self.audit.step_if_idle(self.scheduler)
            self.audit.step_if_idle(self.scheduler)

    @property
    def counts(self) -> tuple[int, int, int]:
        report = self.audit.report()
        return report.num_audited, report.num_skipped, report.num_pending

    @property
    def free(self) -> int:
        return int(self.tree.token_to_kv_pool_allocator.available_size())


def logits_of(tokens: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return torch.randn(VOCAB, generator=generator)
