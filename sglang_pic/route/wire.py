"""The protocol of servers and routers: messages of salted names, and the shared secret."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from sglang_pic.core import Chunker, CoreConfig
from sglang_pic.errors import ConfigError
from sglang_pic.route.sketch import SAMPLE_EVERY, Names

WIRE_VERSION: Final = 1

MAX_NAMES: Final = 16_384
"""Most names in one message, held and gone together: 128 KiB."""

HEARTBEAT_S: Final = 0.8
"""A server without changes sends an empty message so often."""

SILENT_S: Final = 5 * HEARTBEAT_S
"""A server that was silent for so long gets no prompts until its next message."""

MAX_MESSAGE_BYTES: Final = 1 << 22
"""Longest message that a listener reads; delimiters are not limited as names are."""

LENGTH_BYTES: Final = 4
"""A message is preceded by its length, little-endian."""

NONCE_BYTES: Final = 16
"""The server begins a connection with so many random bytes."""

PROOF_BYTES: Final = 32
"""The listener answers with so many bytes, `prove`, and sends nothing else."""

_SALT_BYTES: Final = (16, 64)


class Cutting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a server cuts text into chunks and samples them, for routers to do the same."""

    chunk_min_tokens: int
    chunk_avg_tokens: int
    chunk_max_tokens: int
    delimiters: list[int] = []
    """Ids of the tokens that open or close a message, ascending."""
    sample_every: int = SAMPLE_EVERY

    @classmethod
    def of(cls, config: CoreConfig, delimiters: Iterable[int]) -> Cutting:
        """The cutting of a server with these settings."""
        sizes = {name: getattr(config, name) for name in cls.__struct_fields__ if name.startswith("chunk_")}
        return cls(**sizes, delimiters=sorted(delimiters))

    @property
    def is_known(self) -> bool:
        """Whether this version cuts and samples in this way."""
        try:
            return self.sample_every == SAMPLE_EVERY and self.chunker is not None
        except ConfigError:
            return False

    @property
    def chunker(self) -> Chunker:
        """The server's chunker."""
        return Chunker(CoreConfig(**{name: getattr(self, name) for name in self.__struct_fields__ if "chunk" in name}))


class Update(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a server. Names are 8 bytes each, little-endian."""

    version: int = WIRE_VERSION
    run: int
    """Drawn when the server starts."""
    number: int
    """Counts the messages of a run, so that a lost one is noticed."""
    begins: Cutting | None = None
    """How the server cuts; set in the first of the messages that send all names again. Listeners forget older ones."""
    held: bytes = b""
    """Names of chunks that it can splice from now on."""
    gone: bytes = b""
    """Names of chunks that it can splice no longer."""


class _Version(msgspec.Struct):
    version: int


def encode(update: Update) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(update)


def decode(data: bytes) -> Update:
    """A message from its bytes.

    Raises:
        ValueError: it is not a message, or of another version.
    """
    version = msgspec.msgpack.decode(data, type=_Version).version
    if version != WIRE_VERSION:
        raise ValueError(f"content events of version {version}: this router reads version {WIRE_VERSION}; update both")
    update = msgspec.msgpack.decode(data, type=Update)
    if len(update.held) % 8 or len(update.gone) % 8 or len(update.held) + len(update.gone) > 8 * MAX_NAMES:
        raise ValueError(f"names of {len(update.held)} and {len(update.gone)} bytes: 8 each, {MAX_NAMES} at most")
    return update


def framed(data: bytes) -> bytes:
    """A message as it is sent."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def prove(nonce: bytes, salt: bytes) -> bytes:
    """The listener's answer to a server's random bytes, which proves that it knows the secret."""
    return hashlib.blake2b(nonce, key=salt, digest_size=PROOF_BYTES, person=b"pic-listener").digest()


def address(endpoint: str) -> tuple[str, int]:
    """Host and port of an endpoint; `*` is every address of this machine, or any free port.

    Raises:
        OSError: it is not an endpoint.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}|\*", port) or (port != "*" and int(port) > 65_535):
        raise OSError("must be tcp://HOST:PORT")
    return "" if host == "*" else host.strip("[]"), 0 if port == "*" else int(port)


def pack(names: Iterable[int]) -> bytes:
    """Names in the form of a message."""
    return np.fromiter(names, dtype="<u8").tobytes()


def unpack(data: bytes) -> Names:
    """The names of a message."""
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)


def namespace_bytes(extra_key: str | None, cache_salt: str | None) -> bytes:
    """The canonical bytes of a client's namespace; empty strings count as None, as in SGLang."""
    return msgspec.msgpack.encode((extra_key or None, cache_salt or None))


def read_salt(path: str) -> bytes:
    """The secret in a file, without the white space around it.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short or too long.
    """
    try:
        salt = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"salt_file={path!r}: cannot be read ({error.strerror}); {_HOW}") from error
    low, high = _SALT_BYTES
    if not low <= len(salt) <= high:
        raise ConfigError(f"salt_file={path!r}: has {len(salt)} bytes: {low} to {high} are allowed; {_HOW}")
    return salt


_HOW: Final = "make one with: openssl rand -hex 24 > FILE, and give it to every server and router."
