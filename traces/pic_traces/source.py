"""Where sessions come from: a file, a folder, a packaged sample or a seeded generator, with a clock or without."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import IO

from msgspec.structs import replace

from pic_traces.clock import set_clocks, split_clock
from pic_traces.custom import CustomReader
from pic_traces.data import DATA
from pic_traces.errors import OptionError, TraceError
from pic_traces.lines import SUFFIXES
from pic_traces.logs import Passed, read_logs
from pic_traces.session import Session

SAMPLES = {"agents": DATA / "agents_sample.jsonl.gz", "opendevin": DATA / "opendevin_sample.jsonl.gz"}
"""The traces that travel with the package, by the name in `sample:NAME`."""

TRACE_HELP = (
    "logs of requests or sessions of agents (a file, a folder, or - for stdin), sample:NAME, gen:NAME?key=value&..., "
    "or clock: in front of any of these"
)
"""Help text of an argument that `load` takes."""

# Servers put the hour behind the names of files that they have filled: `server.log.2026-11-25_22`.
_LOG_NAME = re.compile(rf"({'|'.join(map(re.escape, SUFFIXES))})(\.[\d_-]+)?(\.(gz|xz|bz2))?$")

_STDIN: list[IO[bytes]] = []
"""What stdin held, once it has been read."""


def load(trace: str | Path, passed: Passed | None = None, reader: CustomReader | None = None) -> Iterator[Session]:
    """Yield the sessions of a trace, in its order.

    Args:
        trace: a file (JSON, JSONL or a server's log, gzip or plain, of `formats.READERS`, told apart by content), a
            folder of such files, `-` for stdin, `sample:NAME`, or `gen:NAME?key=value&...`; with `clock:` or
            `clock:SEED@` in front, any of these with a clock in every system prompt. Of a folder every file that ends
            like `lines.SUFFIXES` is read, in subfolders too, sorted by path; requests of one session may lie in several
            files.
        passed: notes the lines that are passed over because they are of no known format; without it, one warning is
            logged for all of them.
        reader: reads files of a form that is not known, or None; samples and generators are read as ever.

    Raises:
        TraceError: nothing can be read, or the log would be counted wrongly; the message names the file and the line.
    """
    passed = passed or Passed(is_logged=True)
    name = str(trace)
    clock, seed, rest = split_clock(name)
    if clock:
        return set_clocks(load(rest, passed, reader), seed)
    if name.startswith("gen:"):
        return _generate(name)
    if name.startswith("sample:"):
        sample = name.removeprefix("sample:")
        if sample not in SAMPLES:
            raise TraceError(f"{name}: no such sample; {', '.join(f'sample:{key}' for key in SAMPLES)} are there")
        return _load_file(SAMPLES[sample], passed)
    path = _spooled_stdin() if name == "-" else Path(trace).expanduser()
    try:
        mode = path.stat().st_mode if name else 0
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except (OSError, ValueError) as error:
        raise TraceError(f"{name!r}: cannot be read: {error}") from error
    if stat.S_ISDIR(mode):
        return _load_folder(path, passed, reader)
    if not stat.S_ISREG(mode):
        raise OptionError(
            f"{name!r}: no such file; a path, - for stdin, sample:NAME or gen:NAME?key=value&... is allowed, "
            "clock: in front of any"
        )
    return _load_file(path, passed, reader)


def short_name(trace: str) -> str:
    """The name of a trace in reports: a file's without folder and usual endings, anything else as the user wrote it."""
    clock, _, rest = split_clock(trace)
    if rest.startswith(("gen:", "sample:")):
        return trace
    if rest == "-":
        return f"{clock}stdin"
    name = PurePath(rest).name
    for suffix in (".gz", ".xz", ".bz2", *SUFFIXES):
        name = name.removesuffix(suffix)
    return clock + _written(name or rest)


def limit(
    sessions: Iterator[Session], *, num_sessions: int | None = None, num_calls: int | None = None
) -> list[Session]:
    """The first `num_sessions` sessions, cut after `num_calls` calls in all; None means no limit."""
    result: list[Session] = []
    left = num_calls
    for session in islice(sessions, num_sessions):
        if left == 0:
            break
        result.append(replace(session, specs=session.specs[:left]))
        left = None if left is None else left - result[-1].num_calls
    return result


def _written(name: str) -> str:
    """A name of a file, or after one, as reports have it: it need not be UTF-8, and they are."""
    return name.encode(errors="backslashreplace").decode()


def log_files(folder: Path, *, has_reader: bool) -> list[Path]:
    """The files of a folder that may be logs, all of them for a reader, sorted by path, without hidden ones.

    Raises:
        TraceError: a folder in it cannot be read.
    """
    found: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [Path(root, name) for name in names if name[0] != "." and (has_reader or _LOG_NAME.search(name))]
    return sorted(path for path in found if path.is_file())


def _generate(trace: str) -> Iterator[Session]:
    try:
        generator = importlib.import_module("pic_generate")
    except ModuleNotFoundError as error:
        if error.name != "pic_generate":
            raise
        raise TraceError(f"{trace}: needs sglang-pic-bench: pip install ./bench in the repository") from error
    sessions: Iterator[Session] = generator.generate(trace)
    return sessions


def _load_file(path: Path, passed: Passed, reader: CustomReader | None = None) -> Iterator[Session]:
    return _started(
        read_logs([path], path.name, path.parent, passed, reader), f"{path}: no sessions: the file has no lines"
    )


def _load_folder(folder: Path, passed: Passed, reader: CustomReader | None) -> Iterator[Session]:
    paths = log_files(folder, has_reader=reader is not None)
    if not paths:
        suffixes = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        raise TraceError(
            f"{folder}: no trace in this folder; files {suffixes} and their .gz are read, in subfolders too"
        )
    empty = f"{folder}: no sessions: its {len(paths)} files are empty, {paths[0]} the first of them"
    return _started(read_logs(paths, folder.resolve().name, folder, passed, reader), empty)


def _started(sessions: Iterator[Session], if_empty: str) -> Iterator[Session]:
    """The sessions, the first of which has been read, so that what cannot be read at all is refused at once."""
    first = next(sessions, None)
    if first is None:
        raise TraceError(if_empty)
    return _with_own_ids(chain([first], sessions))


def _with_own_ids(sessions: Iterable[Session]) -> Iterator[Session]:
    """The sessions; the second one of an id, such as another trial of a task, is `ID#2`."""
    num_seen = Counter[str]()
    for session in sessions:
        num_seen[name := _written(session.session_id)] += 1
        yield replace(session, session_id=name if num_seen[name] == 1 else f"{name}#{num_seen[name]}")


def _spooled_stdin() -> Path:
    """What stdin holds, as a file, because it is read more than once; the file goes with the process."""
    if not _STDIN:
        file = tempfile.NamedTemporaryFile(prefix="sglang-pic-stdin-", delete=True)  # noqa: SIM115
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        _STDIN.append(file)
    return Path(_STDIN[0].name)


def _refuse(error: OSError) -> None:
    # Left out, a subfolder would be missing from every figure.
    raise TraceError(f"{error.filename}: cannot be read: {error}") from error
