"""Starting a replay from any process: prepares the run folder, spawns the locust process, reads how it ended."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

import msgspec
import pic_traces
from pic_traces.errors import OptionError, ReplayError

import pic_replay
from pic_replay.options import HIDDEN, ReplayOptions
from pic_replay.turns import TURN
from sglang_pic.output import write_whole

RUN_FILES = ("config.json", "environment.json", "requests.jsonl", "summary.json", "replay.log")
"""The files that a replay writes into its run folder; it changes no others."""

# Exit codes of the replay's process beside 0, 1 (failed requests) and 130: our own errors, and a traceback. They stay
# clear of 1, which Python itself uses for both.
EXIT_REFUSED = 64
EXIT_CRASHED = 70
EXIT_NO_DISK = 74
_COMPLETED = (0, 1)
_INTERRUPTED = 128 + signal.SIGINT
_LOG_TAIL = 15


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job that the replay's process reads from stdin; the descriptors are inherited."""

    options: ReplayOptions
    command: str
    progress_fd: int
    """For the progress bar."""
    turn_fds: tuple[int, int] | None = None
    """The pipes of `Turns`, if it takes turns with other replays."""


def run_replay(options: ReplayOptions) -> Path:
    """Replay a trace in a process of its own and wait for it; the progress bar goes to stderr.

    Failed requests do not raise: they are in the records and in the summary.

    Returns:
        The run folder, with every file of `RUN_FILES`.

    Raises:
        OptionError: an option is not allowed, or the run folder has a run already.
        ReplayError: the replay could not start or crashed; the message has the last lines of its log.
        KeyboardInterrupt: it was interrupted; the run folder has the records so far.
    """
    (out,) = run_replays([options])
    return out


def run_replays(several: Sequence[ReplayOptions]) -> list[Path]:
    """Replay as `run_replay` does, but several at once that take turns: one call of each after the other.

    A slow phase of the machine then slows all of them. Only the first one has a progress bar.

    Args:
        several: with several, each of one session at a time.

    Raises:
        OptionError, ReplayError, KeyboardInterrupt: as `run_replay`.
    """
    prepared = [_prepare(options) for options in several]
    for options, code in zip(prepared, _run_processes(prepared), strict=True):
        _check_end(Path(options.out), code)
    return [Path(options.out) for options in prepared]


def _prepare(options: ReplayOptions) -> ReplayOptions:
    options.check()
    out = _prepare_folder(Path(options.out).expanduser(), force=options.force)
    options = msgspec.structs.replace(options, out=str(out))
    try:
        write_whole(out / "config.json", msgspec.json.format(msgspec.json.encode(options.without_secrets())))
    except OSError as error:
        raise ReplayError(f"{out}: cannot be written: {error.strerror}.") from error
    return options


def _check_end(out: Path, code: int) -> None:
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    if code not in _COMPLETED or not (out / "summary.json").is_file():
        tail = "\n".join((out / "replay.log").read_text(errors="replace").splitlines()[-_LOG_TAIL:])
        if code == EXIT_REFUSED:
            raise ReplayError(tail)
        if code == EXIT_NO_DISK:
            raise ReplayError(f"{out}: cannot be written: {_why_full(out)}; the records there are not whole.")
        raise ReplayError(f"the replay crashed (exit code {code}); the end of {out / 'replay.log'}:\n{tail}")


def _why_full(out: Path) -> str:
    """The error of the folder's disk, which the process could not write into its log."""
    try:
        with tempfile.NamedTemporaryFile(dir=out) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
    except OSError as error:
        return error.strerror or str(error)
    return "the disk was full"


def _prepare_folder(out: Path, *, force: bool) -> Path:
    if os.path.lexists(out) and not out.is_dir():
        raise OptionError(f"out={str(out)!r}: is a file; a folder is needed.")
    present = [name for name in RUN_FILES if os.path.lexists(out / name)]
    if present and not force:
        raise OptionError(f"out={str(out)!r}: has a run already ({', '.join(present)}); choose another or use --force.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in present:
            (out / name).unlink()
    except OSError as error:
        raise OptionError(f"out={str(out)!r}: cannot be written: {error}.") from error
    return out.resolve()


def _run_processes(several: Sequence[ReplayOptions]) -> list[int]:
    """The exit codes of a replay's process each; several form a ring of pipes, of which they inherit two each."""
    with ExitStack() as stack:
        ring = [os.pipe() for _ in several] if len(several) > 1 else []
        try:
            pairs = [(ring[i][0], ring[(i + 1) % len(ring)][1]) if ring else None for i in range(len(several))]
            processes = [
                stack.enter_context(_start(options, number, turn_fds))
                for number, (options, turn_fds) in enumerate(zip(several, pairs, strict=True))
            ]
            for _, first in ring[:1]:
                os.write(first, TURN)
        finally:
            for each in chain.from_iterable(ring):
                os.close(each)
        try:
            return [process.wait() for process in processes]
        except KeyboardInterrupt:
            for process in processes:
                process.send_signal(signal.SIGINT)
            for process in processes:
                process.wait()
            return [_INTERRUPTED for _ in processes]
        except BaseException:
            for process in processes:
                process.terminate()
            raise


def _start(options: ReplayOptions, number: int, turn_fds: tuple[int, int] | None) -> subprocess.Popen[bytes]:
    roots = {str(Path(package.__path__[0]).resolve().parent) for package in (pic_replay, pic_traces)}
    paths = [*sorted(roots), *filter(None, [os.environ.get("PYTHONPATH")])]
    progress_fd = os.open(os.devnull, os.O_WRONLY) if number else _dup_stderr()
    try:
        job = Job(options=options, command=_command(options), progress_fd=progress_fd, turn_fds=turn_fds)
        with (Path(options.out) / "replay.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pic_replay.main"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(progress_fd, *(turn_fds or ())),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                # NOTE: a group of its own keeps the terminal's Ctrl-C from reaching it twice; it is passed on.
                process_group=0,
            )
    finally:
        os.close(progress_fd)
    assert process.stdin is not None
    # A process that has ended already says why in its log.
    with suppress(BrokenPipeError), process.stdin as job_pipe:
        job_pipe.write(msgspec.json.encode(job))
    return process


def _dup_stderr() -> int:
    """A copy of stderr's descriptor: the child's own descriptor 2 is its log."""
    try:
        return os.dup(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):
        return os.open(os.devnull, os.O_WRONLY)


def _command(options: ReplayOptions) -> str:
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    for secret in options.secrets:
        words = [word.replace(secret, HIDDEN) for word in words]
    return shlex.join(words)
