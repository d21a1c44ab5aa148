"""The program of the replay's own process: options as JSON on stdin, a run folder as its result.

NOTE: locust patches the standard library in this process. Nothing else should import this module.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

import gevent
import msgspec
from pic_traces.custom import custom_reader
from pic_traces.errors import TraceError
from pic_traces.flatten import uses_tools
from pic_traces.session import Call, Session
from pic_traces.source import limit, load

from pic_replay import users
from pic_replay.client import Endpoint
from pic_replay.environment import ReplayEnvironment, capture
from pic_replay.launch import EXIT_CRASHED, EXIT_NO_DISK, EXIT_REFUSED, Job
from pic_replay.records import summarize
from pic_replay.server import ServerInfo, ask_server, shows_tools
from pic_replay.state import Replay, Target, Turn
from pic_replay.turns import Turns

_WARMUP_SEED = 20_261_121
_WARMUP_TOKENS = 200
_FULL = {errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS}


def main() -> int:
    """Run the job on stdin; the log (stdout and stderr) is the caller's file. Returns the exit code."""
    _install_interrupts()
    try:
        job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
        return _run(job)
    except TraceError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in _FULL:
            traceback.print_exc()
            return EXIT_CRASHED
        return EXIT_NO_DISK  # the log is on that disk, too
    except Exception:
        traceback.print_exc()
        return EXIT_CRASHED


def _run(job: Job) -> int:
    options = job.options
    out = Path(options.out)
    trace = load(options.trace, reader=custom_reader(options.reader))
    sessions = limit(trace, num_sessions=options.limit_sessions, num_calls=options.limit_calls)
    if not sessions:
        raise TraceError(f"{options.trace}: no sessions to replay")
    endpoint = Endpoint(options.base_url, timeout_s=options.timeout_s, api_key=options.api_key)
    info = ask_server(endpoint, options.base_url, options.model)
    environment = ReplayEnvironment(environment=capture(job.command), seed=_WARMUP_SEED, server=info)
    (out / "environment.json").write_bytes(msgspec.json.format(msgspec.json.encode(environment)))
    target = Target(endpoint, info, options, _flattens(endpoint, info, sessions))
    interrupted = False
    with (out / "requests.jsonl").open("wb") as records, os.fdopen(job.progress_fd, "w", closefd=False) as progress:
        turn: Turn = nullcontext if job.turn_fds is None else Turns(job.turn_fds).turn
        replay = Replay(target, sessions, records, progress, turn)
        try:
            replay.warm_up(_warmup_calls(options.warmup))
            users.run_users(replay, min(options.sessions, len(sessions)))
        except KeyboardInterrupt:
            interrupted = True
            replay.stop("interrupted")
        finally:
            replay.close()
    summary = summarize(
        replay.records,
        trace=options.trace,
        model=info.model,
        planned=replay.planned,
        stopped=replay.stopped,
        tools_flattened=target.flatten,
    )
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    if interrupted:
        return 128 + signal.SIGINT
    return 1 if summary.failed or summary.stopped else 0


def _flattens(endpoint: Endpoint, info: ServerInfo, sessions: list[Session]) -> bool:
    """Whether tools are sent as text; decided once, so that all calls and all arms on one model are treated alike."""
    needed = any(uses_tools(session.pool, None) or any(spec.tools for spec in session.specs) for session in sessions)
    return needed and not shows_tools(endpoint, info)


def _warmup_calls(num: int) -> list[Call]:
    if num == 0:
        return []
    texts = load(f"gen:random?sessions={num}&prompt={_WARMUP_TOKENS}&seed={_WARMUP_SEED}")
    return [call for session in texts for call in session.calls()]


def _install_interrupts() -> None:
    """Turn SIGINT, SIGTERM and the loss of the parent into KeyboardInterrupt in the main greenlet, once."""
    parent = os.getppid()
    seen = False

    def interrupt() -> None:
        # NOTE: gevent hands a KeyboardInterrupt raised in any greenlet to the main one.
        nonlocal seen
        if not seen:
            seen = True
            raise KeyboardInterrupt

    def watch_parent() -> None:
        while os.getppid() == parent:
            gevent.sleep(1)
        interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        gevent.signal_handler(number, interrupt)
    gevent.spawn(watch_parent)


if __name__ == "__main__":
    sys.exit(main())
