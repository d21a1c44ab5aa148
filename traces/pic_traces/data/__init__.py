"""Data that travels with the package: sampled sessions, the words and the tools of generated text."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DATA"]

DATA = Path(__file__).parent
"""The folder of the data files."""
