"""Stock SGLang against the patched server on the same trace."""

from __future__ import annotations
