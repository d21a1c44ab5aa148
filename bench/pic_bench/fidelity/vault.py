"""What a trace's passes leave for one another: logits of full prefills, and which calls are measured.

Every file appears at once, so that an interrupted run can be continued from the files.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np

from pic_bench.fidelity.target import Recorded


class Vault:
    """A folder; about 6 MB a call for a vocabulary of 49,152 and 32 gold tokens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        """Whether a request is kept under this name."""
        return (self._folder / f"{name}.npz").exists()

    def put(self, name: str, recorded: Recorded) -> None:
        """Keep a request; one of the same name is replaced. Keys are not kept."""
        partial = self._folder / "partial.npz"
        np.savez(partial, **{one.name: getattr(recorded, one.name) for one in fields(recorded) if one.name != "keys"})
        partial.replace(self._folder / f"{name}.npz")

    def get(self, name: str) -> Recorded:
        """What is kept under a name; raises `FileNotFoundError` where nothing is."""
        with np.load(self._folder / f"{name}.npz") as arrays:
            others = {field: arrays[field].tolist() for field in arrays.files if field != "logits"}
            return Recorded(logits=arrays["logits"], keys=None, **others)

    def put_measured(self, order: str, names: list[str]) -> None:
        """Note the calls that are measured."""
        partial = self._folder / "partial.json"
        partial.write_bytes(msgspec.json.encode(names))
        partial.replace(self._folder / f"measured-{order}.json")

    def measured(self, order: str) -> list[str] | None:
        """Names of the measured calls, as they were served; None where they are not known yet."""
        path = self._folder / f"measured-{order}.json"
        return msgspec.json.decode(path.read_bytes(), type=list[str]) if path.exists() else None
