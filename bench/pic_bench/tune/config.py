"""What a run of `tune` was asked for and what it drew, and the files of its folder.

DIR/config.json environment.json sample.json served.json answers.json losses.jsonl server.log vault/
DIR/summary.json report.md report.html, and where something is certified pic.json certificate.json
"""

from __future__ import annotations

from typing import Final

import msgspec

from pic_bench.out_folder import CONFIG, ENVIRONMENT, RunKind
from sglang_pic.errors import ConfigError

KIND: Final = "tune"
NAIVE: Final = "naive"  # the arm of the control
FLIPPED: Final = "flipped"  # the control's arm where unrotated keys do no harm, because text seldom moves
CAP: Final = 0.05  # nats a token that one session counts at most
SAMPLE, SERVED, GOLDS, RECORDS, VAULT = "sample.json", "served.json", "answers.json", "losses.jsonl", "vault"
PIC_CONFIG, CERTIFICATE = "pic.json", "certificate.json"
RUN: Final = RunKind(
    KIND,
    "run of tune",
    (
        *(CONFIG, ENVIRONMENT, SAMPLE, SERVED, GOLDS, RECORDS, VAULT, PIC_CONFIG, CERTIFICATE),
        *("server.log", "summary.json", "report.md", "report.html"),
    ),
)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config.json."""

    schema_version: int = 1
    kind: str = KIND
    logs: tuple[str, ...]
    model: str
    budget: float
    """Nats a token."""
    dtype: str
    sessions: int
    """At most so many are drawn; half of them certify."""
    seed: int
    pool_tokens: int
    server_args: tuple[str, ...]
    ladder: tuple[str, ...]
    """As it was when the run began."""
    server: str | None = None
    """URL of the server; None for one that the run starts."""

    def __post_init__(self) -> None:
        if not 0 < self.budget < CAP:
            raise ConfigError(
                f"--budget={self.budget!r}: must be above 0 and below {CAP}, which is the most that a session counts; "
                "0.01 is the default."
            )
        if self.sessions < 2:
            raise ConfigError(f"--sessions={self.sessions!r}: must be 2 or more; half choose, half certify.")
        if self.server is not None and self.server_args:
            raise ConfigError(f"--server-arg {' '.join(self.server_args)!r}: {self.server} runs already; leave it out.")


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """sample.json: what was drawn, and what the census says of the logs."""

    schema_version: int = 1
    logged: int
    sessions: int
    calls: int
    """Served, of the drawn sessions."""
    left_out: int
    """Calls of the drawn sessions that are longer than the model's context."""
    traffic: str
    """Digest of the token ids that are served."""
    reuse: dict[str, float]
    """Each rung's share of the prefix cache's misses on all logs."""
    drawn: tuple[str, ...]
    """The call of each session that chance drew from all."""
    changed: tuple[str, ...]
    """Of each session that has any, a call behind a changed field that chance drew from these; it may be the same."""

    @property
    def num_measured(self) -> int:
        """Calls that are measured."""
        return len({*self.drawn, *self.changed})

    @property
    def num_changed(self) -> int:
        """Sessions of the second half with a call behind a changed field."""
        return sum(place_of(name) >= self.num_choosing for name in self.changed)

    @property
    def num_choosing(self) -> int:
        """Sessions of the first half; of an odd number the second has one more."""
        return self.sessions // 2


def place_of(prompt: str) -> int:
    """The place of a call's session in the drawn order, from the name of its record."""
    return int(prompt.partition("-")[0])
