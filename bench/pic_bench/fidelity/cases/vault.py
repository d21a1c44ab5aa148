"""What a trace's passes leave for one another: logits of full prefills, and which calls are measured.

Every file appears at once, so that an interrupted run can be continued from the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from pic_bench.fidelity.target import Recorded

__all__ = ["Kept", "Vault"]


class Kept(NamedTuple):
    """A recorded request and what was generated after it; no ids where nothing was."""

    recorded: Recorded
    ids: list[int]


class Vault:
    """A folder; about 6 MB a call for a vocabulary of 49,152 and 32 gold tokens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        """Whether a request is kept under this name."""
        return self._file(name).exists()

    def put(self, name: str, kept: Kept) -> None:
        """Keep a request; one of the same name is replaced. Keys are not kept."""
        recorded = kept.recorded
        partial = self._folder / "partial.npz"
        np.savez(
            partial,
            logits=recorded.logits,
            spliced=np.array(recorded.spliced, dtype=np.int64).reshape(-1, 2),
            hits=np.array([recorded.prefix_hit_tokens, recorded.chunk_hit_tokens]),
            ids=np.array(kept.ids, dtype=np.int64),
        )
        partial.replace(self._file(name))

    def get(self, name: str) -> Kept:
        """What is kept under a name; raises `FileNotFoundError` where nothing is."""
        with np.load(self._file(name)) as arrays:
            prefix_hit, chunk_hit = arrays["hits"].tolist()
            recorded = Recorded(
                logits=arrays["logits"],
                spliced=[(int(a), int(b)) for a, b in arrays["spliced"]],
                keys=None,
                prefix_hit_tokens=prefix_hit,
                chunk_hit_tokens=chunk_hit,
            )
            return Kept(recorded, arrays["ids"].tolist())

    def has_measured(self, order: str) -> bool:
        """Whether the calls that are measured in this order are known."""
        return self._measured_file(order).exists()

    def put_measured(self, order: str, names: list[str]) -> None:
        """Note the calls that are measured."""
        partial = self._folder / "partial.json"
        partial.write_bytes(msgspec.json.encode(names))
        partial.replace(self._measured_file(order))

    def measured(self, order: str) -> list[str]:
        """Names of the measured calls, as they were served."""
        return msgspec.json.decode(self._measured_file(order).read_bytes(), type=list[str])

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.npz"

    def _measured_file(self, order: str) -> Path:
        return self._folder / f"measured-{order}.json"
