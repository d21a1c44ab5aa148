"""VCR cassettes in YAML, one interaction at a time: a cassette is never parsed as a whole."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator
from functools import partial
from typing import IO, Any, Final

import msgspec

from pic_traces.session import JsonValue

CASSETTE: Final = re.compile(
    rb"(?:(?:---|#[^\n]*|version:[^\n]*|recorded_with:[^\n]*)?[ \t\r]*\n)*(?:http_)?interactions:[ \t\r]*\n"
)
"""How a cassette begins."""
_ITEM = re.compile(rb"( *)- ")


def items_of(file: IO[bytes], max_bytes: int) -> Iterator[bytes]:
    """The text of each interaction.

    Raises:
        ValueError: one has more than `max_bytes`.
    """
    item, size, start = list[bytes](), 0, b""
    for line in iter(partial(file.readline, max_bytes + 1), b""):
        found = _ITEM.match(line)
        if not start:
            if found is None:
                continue
            start = found[0]
        if line.startswith(start) or not line.startswith((b" ", b"#", b"\n", b"\r")):
            if item:
                yield b"".join(item)
            item, size = [], 0
            if not line.startswith(start):
                # A key beside the list: no more interactions.
                return
        item.append(line)
        size += len(line)
        if size > max_bytes:
            raise ValueError(f"an interaction of more than {max_bytes >> 20} MiB; split the cassette")
    if item:
        yield b"".join(item)


def parse_item(item: bytes, max_bytes: int) -> dict[str, JsonValue]:
    """An interaction; packed bodies are unpacked, up to `max_bytes`, and other bytes become text.

    Raises:
        ValueError: it is no YAML object of JSON's types, it has aliases, which could stand for any size, or the
            package for YAML is missing.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ValueError("a VCR cassette (YAML), which is read with another package: pip install pyyaml") from error
    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]
        """A loader of our own: PyYAML's is shared with others in the process."""

    Loader.add_constructor("tag:yaml.org,2002:timestamp", base.construct_yaml_str)
    Loader.add_constructor("tag:yaml.org,2002:binary", partial(_text, max_bytes=max_bytes))
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(item, Loader=Loader)):
            raise ValueError("a VCR cassette with aliases (*name), which are not read; write the values out")
        found = yaml.load(item, Loader=Loader)[0]
        return msgspec.json.decode(msgspec.json.encode(found), type=dict)
    except (yaml.YAMLError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"bad YAML: {' '.join(str(error).split())}"[:300]) from error


def _text(_: Any, node: Any, *, max_bytes: int) -> str:
    """What stands as bytes: the text, unpacked if it is gzip."""
    data = base64.b64decode(node.value)
    if data.startswith(b"\x1f\x8b"):
        try:
            data = zlib.decompressobj(31).decompress(data, max_bytes)
        except zlib.error:
            return ""
    return data.decode(errors="replace")
