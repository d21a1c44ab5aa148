"""What the serving path tells whoever computes approximate rows again; the code is in `heal`."""

from __future__ import annotations

from sglang_pic.adapter.seams import Req


class Renewal:
    """Nobody does; these are the answers of such a server."""

    def admitted(self, req: Req) -> None:
        """A prefill chunk was admitted and counted."""

    def published(self, req: Req, path_len: int, adopted_from: int) -> None:
        """The tree has the first `path_len` rows of a request, its own ones from `adopted_from` on."""

    def abandon(self) -> None:
        """Drop what waits: the tree was emptied."""
