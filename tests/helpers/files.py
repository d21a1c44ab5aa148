"""Limits on the files that a process may write, and files of traces."""

from __future__ import annotations

import gzip
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No process that starts here can make a file longer, as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write(path: Path, *values: object, indent: int | None = None) -> Path:
    """A file with a line for each value: a text as it is, all else as JSON; packed if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (value if isinstance(value, str) else json.dumps(value, indent=indent) for value in values)
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def request(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **fields}


words = st.text(max_size=8)
contents = st.none() | words | st.lists(st.builds(lambda text: {"type": "text", "text": text}, words), max_size=2)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
messages = st.fixed_dictionaries({"role": roles, "content": contents})
