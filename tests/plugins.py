"""What a server is started with to load a plugin of the tests; it imports nothing that a server would not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def with_plugin(folder: Path, *packages: Path) -> dict[str, str]:
    """The environment of a server that loads the plugin in `folder`, and finds what lies in `packages`."""
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, _ROOT, *packages, *filter(None, sys.path))))}
