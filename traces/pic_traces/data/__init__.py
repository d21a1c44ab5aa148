"""The sampled sessions that travel with the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DATA"]

DATA = Path(__file__).parent
"""The folder of the data files."""
