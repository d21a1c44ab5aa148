"""What a fidelity run was asked for: config.json of its folder, and the sizes of a default and of a quick run."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pic_bench.fidelity.arms import RECORDED, place_sessions
from pic_bench.fidelity.record import Experiment, TemplateSet
from sglang_pic.core.settings import Range, check
from sglang_pic.errors import ConfigError

KIND = "fidelity"
BLOCK_TOKENS = 80
"""Of GRID. From 80 tokens on every repeated span of random text is found whole (study), so each block is one run."""
MAX_BLOCKS = 16
"""As many blocks have markers."""


Number = Annotated[int, Range(0)]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured; what is said of a field is also the help of its flag. Earlier runs name sizes more."""

    prompts: Number = 100
    """Prompts of grid for each number of blocks."""
    questions: Number = 60
    """Questions from each source."""
    blocks: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of blocks of grid."""
    seams: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32)
    """Seam tokens of grid."""
    edits: Number = 240
    """Prompts of edits, from the templates in turn."""
    calls: int | None = None
    """Only the first N calls of every trace."""

    def __post_init__(self) -> None:
        check(self)
        if not self.blocks or not all(1 <= count <= MAX_BLOCKS for count in self.blocks):
            raise ConfigError(f"blocks={list(self.blocks)!r}: must be numbers from 1 to {MAX_BLOCKS}.")
        if not self.seams or not all(0 <= seam < BLOCK_TOKENS for seam in self.seams):
            raise ConfigError(f"seams={list(self.seams)!r}: must be numbers from 0 to {BLOCK_TOKENS - 1}.")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """config.json; its `kind` marks the folder. Earlier runs have fields of experiments that are gone."""

    schema_version: int = 1
    kind: str = KIND
    model: str
    data: tuple[str, ...]
    """Files of questions and traces; empty for what the package carries."""
    experiments: tuple[Experiment, ...]
    dtypes: tuple[str, ...]
    sizes: Sizes
    policies: tuple[str, ...]
    """Of TRACE, as on the command line; of EDITS, beside its own."""
    orders: tuple[str, ...] = (RECORDED,)
    """Of TRACE's sessions."""
    min_chunk_hit: int
    """TRACE measures calls with so many chunk-hit tokens under the first policy."""
    pool_tokens: int | None
    """Of the server's KV pool; None for the plan's."""
    server_args: tuple[str, ...]
    edit_set: TemplateSet = TemplateSet.REPORT
    seed: int

    @property
    def page_size(self) -> int:
        """Of the server, as its flags say."""
        words = list(self.server_args)
        return int(words[words.index("--page-size") + 1]) if "--page-size" in words else 1

    def __post_init__(self) -> None:
        for order in self.orders:
            place_sessions((), order)


QUICK_SIZES = Sizes(
    prompts=8,
    questions=4,
    calls=12,
    edits=16,
    blocks=(1, 4),
    seams=(0, 1, 8),
)
