"""PD disaggregation on the platform: rows are sent over TCP, by Mooncake's package or, without it, by `TransferEngine`.

`--disaggregation-transfer-backend mooncake_tcp` chooses both. The rest is SGLang's own; it asks CUDA for events and
pinned memory.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_BLOCK = struct.Struct("<QQ")
_COUNT = struct.Struct("<I")


class _Event:
    """An event of a CPU: all work before it is done."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: True


def install() -> None:
    """Have processes that make SGLang's engine for transfers, and no others, prepare first."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    engine = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine"
    HookRegistry.register(f"{engine}.__init__", _prepare, HookType.BEFORE)


def _prepare(*_: object, **__: object) -> None:
    import torch

    from pic_platform.pageable import without_pinned_memory

    without_pinned_memory()
    torch.cuda.Event = lambda *_, **__: _Event()  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]
    checksum: Any = import_module("sglang.srt.disaggregation.checksum")
    checksum.KvChecksumComputer.compute = _checksum
    if find_spec("mooncake") is None:
        sys.modules["mooncake.engine"] = sys.modules[__name__]


def _checksum(computer: Any, pages: Any, _states: Any = None) -> int:
    """`--disaggregation-enable-kv-checksum` over the rows in `pages`, `[num_pages]` int64, of all layers."""
    total = 1
    for pointer, size in zip(computer._kv_data_ptrs, computer._kv_item_lens, strict=True):
        for page in pages.tolist():
            total = zlib.adler32(ctypes.string_at(pointer + page * size, size), total)
    return total


class TransferEngine:
    """Mooncake's engine as far as SGLang calls it: one process writes into the memory of another."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._server = socket.socket()

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        """Listen for others; 0, as everywhere here, for success."""
        self._server = socket.create_server((hostname, 0))
        threading.Thread(target=self._listen, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return int(self._server.getsockname()[1])

    def batch_register_memory(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        self._regions.update(zip(ptrs, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, ptrs: Sequence[int]) -> int:
        for ptr in ptrs:
            self._regions.pop(ptr, None)
        return 0

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Write blocks of this process's memory into that of `session`, `host:port`; -1 where they were not taken."""
        host, _, port = session.rpartition(":")
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(_COUNT.pack(len(targets)))
            for source, target, length in zip(sources, targets, lengths, strict=True):
                peer.sendall(_BLOCK.pack(target, length) + ctypes.string_at(source, length))
            return 0 if peer.recv(1) == b"k" else -1

    def _listen(self) -> None:
        while True:
            peer, _ = self._server.accept()
            threading.Thread(target=self._take, args=(peer,), daemon=True).start()

    def _take(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream:
            (count,) = _COUNT.unpack(stream.read(_COUNT.size))
            for _ in range(count):
                target, length = _BLOCK.unpack(stream.read(_BLOCK.size))
                data = stream.read(length)
                if not any(ptr <= target and target + length <= ptr + size for ptr, size in self._regions.items()):
                    return
                ctypes.memmove(target, data, length)
            peer.sendall(b"k")
