"""Between admission and the end of its pass, a spliced batch never makes the host wait for the device.

Nor do the passes that run between rounds. Overlap scheduling prepares the next batch while the device computes this
one; a single wait gives that up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pic_kernels import Backend, Choice, LayerBuffers, RopeParams, Source
from sglang.srt.layers import logits_processor
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor import forward_batch_info as info
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from sglang_pic.adapter.probe.prompt_pass import STEP_TOKENS
from sglang_pic.runtime import fetch, row_groups
from sglang_pic.runtime.host_rows import HostView
from sglang_pic.runtime.rope import RopeGeometry
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolKind, PoolView
from tests.helpers import audit_bench
from tests.helpers.builders import BareRunner, Server, Tree, extend_batch, make_path, scheduled

DEVICE = torch.device("meta")

aten = torch.ops.aten
# Their result, or its size, is read on the host.
_READ_BACK = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.unique_dim,
    aten._unique2,
    aten.unique_consecutive,
}
_MAKE_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)


class WaitError(Exception):
    """The host would have waited for the device."""


class DeviceTensor(torch.Tensor):
    """A tensor on the strict device; `held` has its values in CPU memory."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.held = values
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {}, pinned=set())


def on_device(values: Tensor) -> Tensor:
    """`values` as a tensor of the strict device; both share memory."""
    return DeviceTensor(values)


def read(tensor: Tensor) -> Tensor:
    """The values of a device tensor, for assertions."""
    assert isinstance(tensor, DeviceTensor), f"{tensor.device}: not on the device"
    return tensor.held


@contextmanager
def strict_device() -> Iterator[_Dispatch]:
    """Raise `WaitError` where the host would wait for the device; what is given tells the copies that were made."""
    dispatch = _Dispatch()
    with dispatch, _FromHost(dispatch):
        yield dispatch


class _FromHost(TorchFunctionMode):
    """`torch.tensor` fills host memory, and then copies it to `device`."""

    def __init__(self, dispatch: _Dispatch) -> None:
        super().__init__()
        self._dispatch = dispatch

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            raise WaitError("new_tensor: numbers are copied from memory that is not pinned.")
        if func in _MAKE_FROM_HOST:
            device, pin = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            if pin:
                self._dispatch.pin(made)
            return made if device is None else made.to(device)
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    """Sees the operators whose operands are all in host memory too: factories, and copies to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()
        """Addresses of the storages that were asked for as pinned."""
        self.kept: list[Tensor] = []
        self.num_copies = 0
        """Copies from the host to the device."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pin = kwargs.pop("pin_memory", None)
        result = _run(op, args, kwargs, pinned=self.pinned)
        if pin:
            self.pin(result)
        self.num_copies += _is_copy_from_host(op, args, kwargs)
        return result

    def pin(self, tensor: Tensor) -> None:
        """Take the memory of a tensor for pinned."""
        # Kept alive, so that no other storage gets its address.
        self.kept.append(tensor)
        self.pinned.add(tensor.untyped_storage().data_ptr())


def _run(op: Any, args: Any, kwargs: Mapping[str, Any], *, pinned: set[int]) -> Any:
    """The operator on CPU values; its results are on the device where its operands, or `device`, are."""
    _refuse_waits(op, args, kwargs, pinned)
    tensors = [each for each in _leaves((args, kwargs)) if isinstance(each, DeviceTensor)]
    target = kwargs.get("device")
    to_device = _is_device(target) if target is not None else bool(tensors)
    plain = {**kwargs, "device": torch.device("cpu")} if target is not None else kwargs
    own = {id(each.held): each for each in tensors}

    def unwrap(each: Any) -> Any:
        return each.held if isinstance(each, DeviceTensor) else each

    def wrap(each: Any) -> Any:
        if not to_device or not isinstance(each, Tensor) or isinstance(each, DeviceTensor):
            return each
        return own[id(each)] if id(each) in own else DeviceTensor(each)

    return tree_map(wrap, op(*tree_map(unwrap, args), **tree_map(unwrap, plain)))


def _refuse_waits(op: Any, args: Any, kwargs: Mapping[str, Any], pinned: set[int]) -> None:
    packet = op.overloadpacket
    has_device = any(isinstance(each, DeviceTensor) for each in _leaves((args, kwargs)))
    if packet in _READ_BACK and has_device:
        raise WaitError(f"{op}: the host reads what the device computed.")
    if packet is aten.repeat_interleave and has_device and kwargs.get("output_size") is None:
        raise WaitError(f"{op}: without output_size the host reads how long the result is.")
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_) and has_device:
        for index in (each for each in args[1] if each is not None):
            if index.dtype in (torch.bool, torch.uint8):
                raise WaitError(f"{op}: the host reads how many elements a mask selects.")
            if not isinstance(index, DeviceTensor) and index.dim():
                raise WaitError(f"{op}: indices are copied from host memory that is not pinned.")
    if packet is aten._to_copy and isinstance(args[0], DeviceTensor) and not _is_device(kwargs.get("device", DEVICE)):
        raise WaitError(f"{op}: the host waits for a copy from the device.")
    if packet is aten.copy_ and isinstance(args[1], DeviceTensor) and not isinstance(args[0], DeviceTensor):
        is_pinned = args[0].untyped_storage().data_ptr() in pinned
        if is_pinned and (kwargs.get("non_blocking") or args[2:3] == (True,)):
            return
        raise WaitError(f"{op}: the host waits for a copy from the device.")
    if _is_copy_from_host(op, args, kwargs):
        source = args[0] if packet is aten._to_copy else args[1]
        if source.untyped_storage().data_ptr() not in pinned:
            raise WaitError(f"{op}: {tuple(source.shape)} {source.dtype} are copied from memory that is not pinned.")
        if not (kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2])):
            raise WaitError(f"{op}: {tuple(source.shape)} {source.dtype} are copied with non_blocking=False.")


def _is_copy_from_host(op: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    packet = op.overloadpacket
    if packet is aten._to_copy:
        return not isinstance(args[0], DeviceTensor) and _is_device(kwargs.get("device"))
    if packet is aten.copy_:
        return isinstance(args[0], DeviceTensor) and not isinstance(args[1], DeviceTensor)
    return False


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


SLOTS, LAYERS, HEADS, DIM, ROW = 4096, 2, 2, 8, 1024
TEXTS = [[(7 + 2 * n) * i % 997 + 1000 * n for i in range(300)] for n in range(3)]
PROMPTS = [
    [*range(9_000, 9_040), *TEXTS[0], *range(9_100, 9_150), *TEXTS[1], 1, 2],
    [*range(9_300, 9_400)],
    [*range(9_500, 9_577), *TEXTS[2][5:], *range(9_600, 9_610), *TEXTS[0], 3],
]


class DonorTree(Tree):
    """Every donor's path lies in slots `[1, 1 + length)`, in two nodes."""

    def __init__(self, to: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._parts = to(torch.arange(1, 200)), to(torch.arange(200, 1000))

    def path_device_indices(self, node: int) -> Tensor:
        return torch.cat(self._parts)[:node]


def splicer(kind: PoolKind, to: Callable[[Tensor], Tensor]) -> Splicer:
    """Over a pool of seeded rows."""
    torch.manual_seed(1)
    is_mla = kind is PoolKind.MLA
    shape = (SLOTS, 1, 2 * DIM) if is_mla else (SLOTS, HEADS, DIM)
    keys, values = (tuple(to(torch.randn(shape).bfloat16()) for _ in range(LAYERS)) for _ in range(2))
    rotary = {"rope_offset": DIM if is_mla else 0, "rope_dim": DIM}
    sizes = {"num_slots": SLOTS, "page_size": 1, "start_layer": 0}
    view = PoolView(kind, keys, () if is_mla else values, torch.bfloat16, **sizes, **rotary)
    rope = RopeParams(to(1e4 ** -(torch.arange(DIM // 2) / (DIM // 2))), DIM, is_neox_style=True)
    return Splicer(view, RopeGeometry(tuple(range(LAYERS)), (rope,) * LAYERS, max_shift=ROW))


def batches(reqs: list[Any], to: Callable[[Tensor], Tensor], table: Tensor, **fields: Any) -> tuple[Any, Any]:
    """The scheduler's batch of whole prompts, and what SGLang makes of it for a pass."""
    lens = [len(req.full_untruncated_fill_ids) for req in reqs]
    rows = [req.kv.req_pool_idx for req in reqs]
    logprob_starts = [n - (5 if fields else 0) for n in lens]
    batch = extend_batch(
        lens,
        rows=rows,
        to=to,
        input_ids=torch.tensor([token for req in reqs for token in req.full_untruncated_fill_ids]),
        out_cache_loc=torch.cat([read_any(table)[row, :n] for row, n in zip(rows, lens, strict=True)]).long(),
        extend_logprob_start_lens_cpu=logprob_starts,
        capture_hidden_mode=info.CaptureHiddenMode.NULL,
        **fields,
    )
    return scheduled(reqs, lens, extend_logprob_start_lens=logprob_starts), batch


def read_any(tensor: Tensor) -> Tensor:
    return read(tensor) if tensor.device == DEVICE else tensor


def serve(kind: PoolKind, to: Callable[[Tensor], Tensor], **fields: Any) -> dict[str, Any]:
    """A batch with splices from its requests' plans to its logits; what the layers and the logits step were given."""
    server, tree = Server(), DonorTree(to)
    for number, text in enumerate(TEXTS):
        server.serve([*range(20_000 + 100 * number, 20_040 + 100 * number), *text])
    table = to(1000 + torch.arange(3 * ROW, dtype=torch.int32).view(3, ROW))
    reqs = [server.receive(prompt) for prompt in PROMPTS]
    for row, req in enumerate(reqs):
        req.kv = SimpleNamespace(req_pool_idx=row)
        server.planning.plan(req, tree, max_gaps=64)
        plan = req.pic.admit(0, len(req.full_untruncated_fill_ids), first_chunk=True)
        assert (plan is None) == (row == 1), "requests with and without splices"
    scheduled, batch = batches(reqs, to, table, **fields)
    path, seen = make_path(splicer(kind, to)), {}
    translator = KVIndexTranslator(
        req_to_token=table, token_to_kv_pool_allocator=None, token_to_kv_pool=None, page_size=1, device=str(DEVICE)
    )
    runner: Any = BareRunner(ROW)
    runner.req_to_token_pool.req_to_token, runner.kv_index_translator = table, translator

    def compute(_runner: Any, narrowed: Any) -> str:
        seen.update(vars(narrowed))
        metadata = path._logits_metadata(LogitsMetadata.from_forward_batch.__func__, LogitsMetadata, narrowed)
        states = LogitsProcessor._get_pruned_states(None, narrowed.positions, None, None, metadata)
        seen.update({f"logits {name}": value for name, value in vars(metadata).items()}, states=states[0])
        return "output"

    path._prepare(batch, info.ForwardBatch, scheduled, runner)
    assert path._forward(compute, runner, batch) == "output"
    assert seen["batch_size"] > len(reqs), "the batch was narrowed to its gaps"
    assert tree.locks == []
    view = path.splicer.view
    return {**seen, **{f"layer {i}": buffer for i, buffer in enumerate((*view.keys, *view.values))}}


@pytest.mark.parametrize("kind", PoolKind)
@pytest.mark.parametrize("fields", [{}, {"return_logprob": True, "top_logprobs_nums": [0] * 3}], ids=["", "logprobs"])
def test_a_spliced_batch_is_computed_without_waiting(
    kind: PoolKind, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the strict device and on the CPU every tensor is the same, bit for bit."""
    monkeypatch.setenv("SGLANG_PIC_KERNELS", "eager")
    # As on a GPU.
    monkeypatch.setattr(logits_processor, "is_pin_memory_available", lambda: True)
    fields = {**fields, **({"token_ids_logprobs": [None] * 3} if fields else {})}
    with strict_device():
        want = serve(kind, lambda tensor: tensor, **fields)
    with strict_device() as device:
        got = serve(kind, on_device, **fields)
    sglangs_own = 2 if fields else 0
    assert device.num_copies == 1 + sglangs_own, "everything that the device is told goes there at once"
    tensors = [name for name, value in want.items() if isinstance(value, Tensor)]
    assert {"seq_lens", "extend_start_loc", "mrope_positions", "logits extend_seq_lens", "layer 0"} <= {*tensors}
    for name in tensors:
        there = read_any(got[name])
        assert (there.dtype, there.shape) == (want[name].dtype, want[name].shape), name
        assert torch.equal(there, want[name]), name
        assert (got[name].device == DEVICE) != name.endswith("_cpu"), name


@pytest.mark.usefixtures("no_groups")
def test_passes_between_rounds_are_queued_without_waiting() -> None:
    bench: Any = audit_bench.Bench()
    runner, pool, allocator = bench.runner, bench.runner.req_to_token_pool, bench.tree.token_to_kv_pool_allocator
    runner.device, runner.rows, runner.logits = DEVICE, on_device(runner.rows), on_device(runner.logits)
    pool.req_to_token, allocator.free_pages = on_device(pool.req_to_token), on_device(allocator.free_pages)

    def forward(batch: Any) -> Any:
        runner.rows[batch.out_cache_loc] = batch.input_ids + 1
        runner.logits.copy_(batch.seq_lens.sum() * torch.arange(audit_bench.VOCAB, device=DEVICE) % 7)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=runner.logits))

    runner.forward = forward
    bench.serve(on_device(torch.arange(audit_bench.VOCAB) * len(audit_bench.PROMPT) % 7.0))
    with strict_device() as device:
        bench.run()
    assert (bench.counts, bench.audit.report().mean_kl) == ((1, 0, 0), 0)
    num_steps = len(read(runner.rows).nonzero()) / STEP_TOKENS
    assert device.num_copies == 2 * math.ceil(num_steps), "token ids, and the numbers of a batch"


def test_the_first_fetch_from_the_host_is_queued_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a draft, whose fetches are not timed at start-up: the kernel finds its tables of addresses made."""
    there, fetched = splicer(PoolKind.MHA, on_device), list[Tensor]()
    monkeypatch.setattr(row_groups.RowGroup, "choice", lambda *_: Choice(Backend.TRITON))
    monkeypatch.setattr(fetch, "_bring", lambda slots, _: on_device(slots))
    rows = tuple(torch.zeros(SLOTS, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS))
    fetcher = fetch.Fetcher(there, HostView(rows, rows, 1, 1, 1))

    def launch(keys: LayerBuffers, *_: object, source: Source, **__: object) -> None:
        fetched.extend(part.addresses_on(keys.device) for part in source if part is not None)

    monkeypatch.setattr(row_groups, "splice_rows", launch)
    slots = on_device(torch.arange(8))
    with strict_device():
        fetcher.fetch(torch.arange(8), slots, slots)
    assert len(fetched) == 2, "keys and values"


NUMBERS = torch.arange(4)


@pytest.mark.parametrize(
    "wait",
    [
        lambda there: torch.tensor([1, 2], device=DEVICE),
        lambda there: torch.as_tensor(NUMBERS, device=DEVICE),
        lambda there: NUMBERS.to(DEVICE, non_blocking=True),
        lambda there: torch.empty(4, dtype=torch.int64, pin_memory=True).to(DEVICE),
        lambda there: there.new_tensor([1]),
        lambda there: there.copy_(NUMBERS),
        lambda there: there[NUMBERS],
        lambda there: there[[0, 1]],
        lambda there: there[there > 1],
        lambda there: there.nonzero(),
        lambda there: there.unique(),
        lambda there: torch.repeat_interleave(there, there),
        lambda there: int(there.max()),
        lambda there: bool(there[0] == 0),
        lambda there: torch.equal(there, there),
        lambda there: there.cpu(),
        lambda there: NUMBERS.clone().copy_(there),
        lambda there: NUMBERS.clone().copy_(there, non_blocking=True),
        lambda there: torch.empty(4, dtype=torch.int64, pin_memory=True).copy_(there),
    ],
)
def test_the_strict_device_refuses_what_waits(wait: Callable[[Tensor], object]) -> None:
    with strict_device(), pytest.raises(WaitError):
        wait(on_device(NUMBERS.clone()))
