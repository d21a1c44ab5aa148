"""The router's end of the content events' port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sglang_pic.route.wire import LENGTH_BYTES, MAX_MESSAGE_BYTES, NONCE_BYTES, SILENT_S, address, prove

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0


async def listen(endpoint: str, salt: bytes, take: Callable[[bytes], bool]) -> None:
    """Pass every message of a server to `take`, forever.

    It connects again, and gets all names again, if the connection ended or was silent, or `take` returned False.

    Args:
        endpoint: where the server publishes, such as `tcp://10.0.0.1:5570`.
        salt: the secret that it shares with its listeners.
        take: gets each message; returns False if all names must be sent again.
    """
    failure = ""
    while True:
        try:
            await _listen_once(endpoint, salt, take)
            failed = ""
        except asyncio.IncompleteReadError:
            failed = "the connection ended: the server stopped, or has another secret"
        except (OSError, ValueError) as error:
            failed = str(error) or "silent"
        if failed != failure:
            logger.warning("%s: %s", endpoint, failed or "asked for all names again")
            failure = failed
        await asyncio.sleep(_AGAIN_S)


async def _listen_once(endpoint: str, salt: bytes, take: Callable[[bytes], bool]) -> None:
    async with asyncio.timeout(SILENT_S):
        reader, writer = await asyncio.open_connection(*address(endpoint))
    try:
        async with asyncio.timeout(SILENT_S):
            writer.write(prove(await reader.readexactly(NONCE_BYTES), salt))
        while True:
            async with asyncio.timeout(SILENT_S):
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
                if length > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {length} bytes: {MAX_MESSAGE_BYTES} at most")
                data = await reader.readexactly(length)
            if not take(data):
                return
    finally:
        writer.close()
