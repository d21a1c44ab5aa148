"""`make gpu`: runs the items one after the other, each as a process of its own with a time limit, and shows the tables.

An item that fails, dies or takes too long does not stop the next one. Records, logs and tables go into one folder, each
record as soon as its item has ended; a second run of some items writes these again and keeps the others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
from pic_traces.printable import printable_output

from pic_bench.environment import capture_environment
from pic_bench.gpu.record import ITEMS, Found, Item, Record, Work, file_name, read_records, render, show
from pic_bench.out_folder import write_json
from pic_bench.study_command import at_least, interrupt_on_sigterm
from sglang_pic.core.native import load_loops
from sglang_pic.errors import PicError

# An item that is asked to end stops its servers, which may take as long as this.
_GRACE_S: Final = 45.0
_PROGRESS_S: Final = 20.0
# A dry run's servers fork their processes and do without pinned memory, as those of the tests do.
_TEST_PLUGINS: Final = "tests.e2e.plugins:fork pic_platform.pageable:without_pinned_memory"
_ROOT: Final = Path(__file__).resolve().parents[3]
_PAGE: Final = _ROOT / "bench" / "results" / "GPU.md"
_RESULTS: Final = _PAGE.parent / "gpu"


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested items; 0 if none failed, 1 if one did, 2 for a usage error."""
    args = _parse(argv)
    if args.page:
        _PAGE.write_text(render(_PAGE.read_text("utf8"), read_records(_RESULTS)), "utf8")
        return 0
    if args.one:
        return _work(args)
    if reason := _unable(args):
        print(f"gpu: {reason}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [item for item in ITEMS if not args.item or item.name in args.item]
    print(f"gpu: {len(wanted)} items, {'with' if find_spec('sglang') else 'without'} SGLang, into {args.out}")
    is_over, started = threading.Event(), time.monotonic()
    # A dry run measures nothing, so two items share a CPU.
    with interrupt_on_sigterm(), ThreadPoolExecutor(2 if args.dry_run else 1) as threads:
        try:
            for running in [threads.submit(_take, item, args, is_over) for item in wanted]:
                running.result()
        finally:
            # An interrupted day leaves no servers running, and shows its records.
            is_over.set()
            threads.shutdown(cancel_futures=True)
            done = show(args.out, [item.name for item in wanted])
            print(f"{len(wanted)} items took {time.monotonic() - started:.0f} s", flush=True)
    return done


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [item.name for item in ITEMS]
    parser = argparse.ArgumentParser(prog="make gpu", description="Everything to check and measure on a GPU, in order.")
    add = parser.add_argument
    add("--item", nargs="+", choices=names, metavar="NAME", help=f"only these: {', '.join(names)}")
    add("--dry-run", action="store_true", help="tiny sizes on a CPU, Triton interpreted: does everything run?")
    add("--model", metavar="FOLDER", help="an 8B model for `defaults` and `latency` (default: dummy weights)")
    add("--commit", help="the commit to record where the checkout has no git")
    limit = "seconds an item may take (default: by the number of servers that it starts)"
    add("--limit-s", type=at_least(0.1), metavar="S", help=limit)
    add("--out", type=Path, default=Path("runs/gpu"), help="folder of records and logs (default: %(default)s)")
    add("--page", action="store_true", help=f"write the table of {_PAGE.relative_to(_ROOT)} from {_RESULTS.name}/")
    add("--one", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    return args


def _unable(args: argparse.Namespace) -> str:
    """Why nothing can be run here; empty where something can."""
    missing = [name for name in ("torch", "triton", "numpy") if find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: needs torch 2.10 or later, triton and numpy."
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        return "torch finds no GPU; ARGS=--dry-run runs every item with tiny sizes on the CPU."
    if not args.dry_run and os.environ.get("SGLANG_PIC_LOOPS") != "python" and not load_loops():
        return (
            "numba does not compile the loops of plans, so that plans take 100 times longer and figures miss their "
            "aims: pip install numba, or measure without by SGLANG_PIC_LOOPS=python."
        )
    return ""


def _limits_s(item: Item, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds that an item may take, and of these a start of a server."""
    warm = read_records(args.out).get("warm")
    limit_s, start_s = item.limits_s(is_warm=warm is not None and warm.status == "ok" and not warm.is_dry)
    return args.limit_s or limit_s, start_s


def _take(item: Item, args: argparse.Namespace, is_over: threading.Event) -> None:
    """One item and its record, unless the day is interrupted."""
    print(f"{item.name}: {item.what} ...", flush=True)
    if item.servers and find_spec("sglang") is None:
        record = _record(item, args, "left out", Found(notes=["needs sglang"]), 0.0)
    else:
        record = _run(item, args, is_over)
    if is_over.is_set():
        return
    write_json(args.out / file_name(item.name), record)
    said = [*record.found.failures, *(record.found.notes if args.dry_run else ())]
    print("\n    ".join([f"{item.name}: {record.status}, {record.wall_s:.0f} s", *said]), flush=True)


def _run(item: Item, args: argparse.Namespace, is_over: threading.Event) -> Record:
    """One item as a process; its own record, or one that says how it ended."""
    path = args.out / file_name(item.name)
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pic_bench.gpu", *args.words, "--one", item.name]
    env = dict(os.environ)
    if args.dry_run:
        # One thread, for tiny tensors; Triton is interpreted from the start of a process, or not at all.
        env |= {"OMP_NUM_THREADS": "1"} | ({} if item.servers else {"TRITON_INTERPRET": "1"})
        if item.servers and (plugin := _ROOT / "tests" / "e2e" / "plugin").exists():
            env |= {"PYTHONPATH": os.pathsep.join(map(str, (plugin, _ROOT, *filter(None, sys.path))))}
            env |= {"PIC_TEST_PLUGINS": _TEST_PLUGINS}
    log_path, limit_s = path.with_suffix(".log"), _limits_s(item, args)[0]
    log_path.unlink(missing_ok=True)
    started, ending = time.monotonic(), "died"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if not _wait(process, limit_s, item, args.out, is_over):
                ending = "stopped"
        finally:
            _end(process)
    wall_s = time.monotonic() - started
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Record)
    lines = log_path.read_text("utf8", errors="replace").splitlines()[-5:]
    how = f"after {limit_s:.0f} s" if ending == "stopped" else f"with exit status {process.returncode}"
    said = f"{ending} {how}; {log_path}: {' / '.join(lines)[-400:]}"
    return _record(item, args, ending, Found(failures=[said]), wall_s)


def _wait(process: subprocess.Popen[bytes], limit_s: float, item: Item, folder: Path, is_over: threading.Event) -> bool:
    """Wait for an item, and show now and then what it or its server has logged; False at the limit."""
    started = shown = time.monotonic()
    while not is_over.is_set() and (left := limit_s - (time.monotonic() - started)) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(left, 1.0))
            return True
        if (now := time.monotonic()) - shown > _PROGRESS_S:
            shown, logs = now, [*folder.glob(f"*-{item.name}*.log")]
            log = max(logs, key=lambda path: path.stat().st_mtime)
            last = log.read_bytes()[-400:].decode("utf8", errors="replace").strip().rpartition("\n")[2]
            print(f"    {item.name}, {now - started:.0f} s, {log.name}: {last[:120]}", flush=True)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask an item to end, which stops its servers, then kill the rest of its group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _work(args: argparse.Namespace) -> int:
    """The item's own process: do the work and write the record, whatever happens."""
    (item,) = (item for item in ITEMS if item.name == args.one)
    started = time.monotonic()
    module, _, function = item.work.partition(":")
    try:
        # Servers are stopped on the way out.
        with interrupt_on_sigterm():
            run = getattr(import_module(f"pic_bench.gpu.{module}"), function)
            work = Work(args.dry_run, args.out, _limits_s(item, args)[1], args.model)
            found: Found = run(work)
    except Exception as error:
        # Compilers and drivers raise anything.
        traceback.print_exc()
        said = str(error) if isinstance(error, PicError) else f"{type(error).__name__}: {str(error)[:1_000]}"
        found = Found(failures=[said])
    if args.dry_run:
        found.notes.append(f"not on a CPU: {item.left_out}")
    status = "failed" if found.failures else "ok"
    record = _record(item, args, status, found, time.monotonic() - started)
    write_json(args.out / file_name(item.name), record)
    return 1 if found.failures else 0


def _record(item: Item, args: argparse.Namespace, status: str, found: Found, wall_s: float) -> Record:
    environment = msgspec.structs.replace(capture_environment(), compiled_loops=load_loops())
    if args.commit:
        environment = msgspec.structs.replace(environment, commit=args.commit)
    return Record(
        item=item.name,
        status=status,
        is_dry=args.dry_run,
        wall_s=wall_s,
        environment=environment,
        found=found,
    )
