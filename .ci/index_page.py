"""What an index shows of the package: README.md with absolute links, and the project's addresses.

`REPOSITORY_URL` names the repository during a build. Without it links stay relative, and there are no addresses.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)\s]+)\)")
_ADDRESSES = {
    "Source": "",
    "Documentation": "/blob/HEAD/README.md",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Issues": "/issues",
}


class IndexPage(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        url = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        text = Path(self.root, "README.md").read_text("utf8")
        if url:
            text = _LINK.sub(
                lambda link: f"{link[1]}{link[2]}({url}/{'raw' if link[1] else 'blob'}/HEAD/{link[3]})", text
            )
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {name: url + path for name, path in _ADDRESSES.items()} if url else {}
