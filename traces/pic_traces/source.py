"""Where sessions come from: a file, a folder, a packaged sample or a seeded generator, with a clock or without."""

from __future__ import annotations

import importlib
import os
import stat
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import chain, islice
from pathlib import Path, PurePath

import msgspec

from pic_traces.blocks import recognize_blocks
from pic_traces.clock import set_clocks, split_clock
from pic_traces.data import DATA
from pic_traces.errors import TraceError
from pic_traces.lines import JSON_SUFFIXES, LINES_SUFFIXES, Line, read_objects
from pic_traces.openai_log import is_request, name_by_line, parse_requests
from pic_traces.recorded import is_recorded, parse_recorded
from pic_traces.session import Session

SAMPLES = {"agents": DATA / "agents_sample.jsonl.gz", "opendevin": DATA / "opendevin_sample.jsonl.gz"}
"""The traces that travel with the package, by the name in `sample:NAME`."""

TRACE_HELP = (
    "recorded sessions or request logs (a file or a folder of them), sample:NAME, gen:NAME?key=value&..., or clock: in "
    "front of any of these"
)
"""Help text of an argument that `load` takes."""

_LOG_SUFFIXES = (*LINES_SUFFIXES, *JSON_SUFFIXES)


def load(trace: str | Path) -> Iterator[Session]:
    """Yield the sessions of a trace, in its order.

    Args:
        trace: a file (JSON or JSONL, gzip or plain: recorded sessions or OpenAI chat requests, told apart by content),
            a folder of such files of one kind, `sample:NAME`, or `gen:NAME?key=value&...`; with `clock:` or
            `clock:SEED@` in front, any of these with a clock in every system prompt. Of a folder every `*.jsonl`,
            `*.json` and their `.gz` is read, in subfolders too, sorted by path; requests of one session may lie in
            several files.

    Raises:
        TraceError: at the first thing that cannot be read; the message names the file and the line.
    """
    name = str(trace)
    clock, seed, rest = split_clock(name)
    if clock:
        return set_clocks(load(rest), seed)
    if name.startswith("gen:"):
        return _generate(name)
    if name.startswith("sample:"):
        sample = name.removeprefix("sample:")
        if sample not in SAMPLES:
            raise TraceError(f"{name}: no such sample; {', '.join(f'sample:{key}' for key in SAMPLES)} are there")
        return _load_file(SAMPLES[sample])
    path = Path(trace).expanduser()
    try:
        mode = path.stat().st_mode if name else 0
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except (OSError, ValueError) as error:
        raise TraceError(f"{name!r}: cannot be read: {error}") from error
    if stat.S_ISDIR(mode):
        return _load_folder(path)
    if not stat.S_ISREG(mode):
        raise TraceError(
            f"{name!r}: no such file; a path, sample:NAME or gen:NAME?key=value&... is allowed, clock: in front of any"
        )
    return _load_file(path)


def short_name(trace: str) -> str:
    """The name of a trace in reports: a file's without folder and usual endings, anything else as the user wrote it."""
    clock, _, rest = split_clock(trace)
    if rest.startswith(("gen:", "sample:")):
        return trace
    name = PurePath(rest).name
    for suffix in (".gz", ".jsonl", ".json"):
        name = name.removesuffix(suffix)
    return clock + (name or rest)


def limit(
    sessions: Iterator[Session], *, num_sessions: int | None = None, num_calls: int | None = None
) -> list[Session]:
    """The first `num_sessions` sessions, cut after `num_calls` calls in all; None means no limit."""
    result: list[Session] = []
    left = num_calls
    for session in islice(sessions, num_sessions):
        if left == 0:
            break
        result.append(msgspec.structs.replace(session, specs=session.specs[:left]))
        left = None if left is None else left - result[-1].num_calls
    return result


class _Format(Enum):
    """What an object of a trace can be; the value names it in messages."""

    RECORDED = "recorded sessions (`messages` and `turns`)"
    REQUEST = "OpenAI chat requests (`messages`)"


def _generate(trace: str) -> Iterator[Session]:
    try:
        generator = importlib.import_module("pic_generate")
    except ModuleNotFoundError as error:
        if error.name != "pic_generate":
            raise
        raise TraceError(f"{trace}: generators are in another package: pip install sglang-pic-bench") from error
    sessions: Iterator[Session] = generator.generate(trace)
    return sessions


def _load_file(path: Path) -> Iterator[Session]:
    if (kind := recognize_blocks(path)) is not None:
        raise TraceError(f"{path}: a serving trace ({kind.label}): it has no text; `sglang-pic census` reads its hits")
    return _parse([path], path.name, name_by_line, f"{path}: no sessions: the file has no lines")


def _load_folder(folder: Path) -> Iterator[Session]:
    paths = _log_files(folder)
    if not paths:
        suffixes = ", ".join(f"*{suffix}" for suffix in _LOG_SUFFIXES)
        raise TraceError(f"{folder}: no trace in this folder; files {suffixes} are read, in subfolders too")

    def name_by_file(line: Line) -> str:
        return f"{line.path.relative_to(folder)}-{line.number:06d}"

    empty = f"{folder}: no sessions: its {len(paths)} files are empty, {paths[0]} the first of them"
    return _parse(paths, folder.resolve().name, name_by_file, empty)


def _log_files(folder: Path) -> list[Path]:
    """The files of a folder that may be logs, sorted by path; hidden files and folders are passed over."""
    found: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [Path(root, name) for name in names if name[0] != "." and name.endswith(_LOG_SUFFIXES)]
    return sorted(path for path in found if path.is_file())


def _refuse(error: OSError) -> None:
    # Left out, a subfolder would be missing from every figure.
    raise TraceError(f"{error.filename}: cannot be read: {error}") from error


def _parse(paths: list[Path], source: str, name_line: Callable[[Line], str], if_empty: str) -> Iterator[Session]:
    rest = chain.from_iterable(map(read_objects, paths))
    first = next(rest, None)
    if first is None:
        raise TraceError(if_empty)
    form = _recognize(first)
    if form is None:
        raise first.error(
            f"unknown trace format: its keys are {_keys(first)}; "
            "expected `messages` and `turns` (a recorded session) or `messages` (an OpenAI chat request)"
        )
    lines = (_expect(form, first, line) for line in chain([first], rest))
    if form is _Format.RECORDED:
        return map(parse_recorded, lines)
    return parse_requests(lines, source, name_line)


def _recognize(line: Line) -> _Format | None:
    if is_recorded(line.value):
        return _Format.RECORDED
    return _Format.REQUEST if is_request(line.value) else None


def _expect(form: _Format, first: Line, line: Line) -> Line:
    """The line itself; refuses another format than the first line's."""
    found = _recognize(line)
    if line.path != first.path and found is not form:
        what = "of an unknown format" if found is None else f"of {found.value}"
        raise line.error(
            f"{what}, but {first.path} has {form.value}; a folder must have one format (keys: {_keys(line)})"
        )
    if found is None and form is _Format.REQUEST:
        raise line.error(f"no chat request: no `messages` among the keys {_keys(line)}")
    return line


def _keys(line: Line) -> str:
    return ", ".join(sorted(line.value)) or "(none)"
