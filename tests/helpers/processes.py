"""Work in processes of its own, because SGLang's process-wide state has no way back."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from sglang_pic.adapter.serve.forward import ForwardPath
from sglang_pic.adapter.sglang.hooks import apply_hooks
from sglang_pic.runtime import read_geometry, view_pool
from sglang_pic.runtime.splice import Splicer
from tests.helpers.with_sglang import with_sglang


def on_live_model(cases: Callable[[Any, Any], object], model: object, **server: Any) -> Any:
    """What `cases(runner, tokenizer)` finds on a model in a new process, as plain values.

    Args:
        cases: a function of a module, or a `functools.partial` of one.
        model: the model's folder.
        server: further arguments of SGLang's `ServerArgs`.
    """
    ours, theirs = with_sglang().Pipe(duplex=False)
    process = with_sglang().Process(target=_load, args=(theirs, cases, str(model), server))
    process.start()
    theirs.close()
    assert ours.poll(280), "the model's process says nothing"
    is_well, found = ours.recv()
    process.join(20)
    assert is_well, found
    return found


def _load(results: Connection, cases: Callable[[Any, Any], object], model: str, server: dict[str, Any]) -> None:
    """Load the model as SGLang's own benchmark of one batch does, and run the cases in the benchmark's place."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    def run(*args: Any) -> None:
        bench_runner, tokenizer = load_model(*args)
        results.send((True, msgspec.to_builtins(cases(bench_runner.torch_runner, tokenizer))))
        raise SystemExit(0)

    try:
        load_plugins()
        load_model, one_batch.load_model = one_batch.load_model, run
        args = ServerArgs(model_path=model, device="cpu", max_total_tokens=1_600, **server)
        # SGLang does not remove its temporary files.
        with tempfile.TemporaryDirectory() as tempfile.tempdir:
            one_batch.main(args, one_batch.BenchArgs())
    except Exception:
        results.send((False, traceback.format_exc()))


def spliced_path(runner: Any) -> ForwardPath:
    """Our way of the forward pass, in place on a live model."""
    # Imports SGLang, which the doctor's processes must not have done before they choose a card.
    from tests.helpers.builders import make_path

    geometry = read_geometry(runner.model, max_shift=8_192)
    path = make_path(Splicer(view_pool(runner.token_to_kv_pool), geometry))
    path.install()
    apply_hooks()
    return path


def join_group(rank: int, size: int, store: str, *, timeout_s: int) -> None:
    """Make this process a rank of a group of `size`, which meet in the file `store`."""
    meeting = torch.distributed.FileStore(store, size)
    limit = timedelta(seconds=timeout_s)
    torch.distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=limit)


def forked(size: int, work: Callable[[int], object]) -> list[Any]:
    """What `work(number)` returns in each of `size` copies of this process; of an exception, its text."""
    context = multiprocessing.get_context("fork")
    answers: SimpleQueue[tuple[int, object]] = context.SimpleQueue()
    everyone = context.Barrier(size)

    def run(number: int) -> None:
        try:
            answers.put((number, work(number)))
        except Exception as error:
            answers.put((number, f"{type(error).__name__}: {error}"))
        everyone.wait(30)  # A process that ends closes its connections, under others that may still make theirs.

    processes = [context.Process(target=run, args=(number,)) for number in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(40)
        assert process.exitcode == 0
    return [answer for _, answer in sorted(answers.get() for _ in processes)]


def on_each_rank(size: int, file: Path, work: Callable[[int, Any], str]) -> list[str]:
    """What `work(rank, tp_group)` returns, rank by rank, in a real process group of `size` processes."""

    def in_group(rank: int) -> str:
        join_group(rank, size, str(file), timeout_s=20)
        return work(rank, SimpleNamespace(world_size=size, rank_in_group=rank, cpu_group=torch.distributed.group.WORLD))

    return forked(size, in_group)
