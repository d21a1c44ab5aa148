"""Position-independent KV-cache reuse for SGLang, as a plugin."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
