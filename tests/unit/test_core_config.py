"""Settings of the core: what is refused, and how the message reads."""

from __future__ import annotations

import msgspec
import pytest

from sglang_pic.core import CoreConfig, PlanOptions
from sglang_pic.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_min_tokens", 0),
        ("chunk_min_tokens", 64),
        ("chunk_max_tokens", 63),
        ("sink_tokens", -1),
        ("seam_tokens", -1),
        ("seam_tokens", True),
        ("min_run_tokens", 0),
        ("tail_tokens", -1),
        ("min_spliced_tokens", 0),
        ("foreign_tokens", -1),
        ("unseen_percent", 101),
        ("max_index_tokens", 0),
        ("max_index_bytes", 0),
        ("max_donors_per_chunk", 65),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value!r}: must be an integer from \d+ to \d+; the default is"):
        CoreConfig(**{name: value})


def test_averages_are_those_the_cutter_can_do() -> None:
    with pytest.raises(ConfigError, match=r"^chunk_avg_tokens=33: must be one of 16, 32, 64"):
        CoreConfig(chunk_avg_tokens=33)


@pytest.mark.parametrize(
    "name",
    [
        "seam_tokens",
        "max_gaps",
        "max_runs",
        "min_run_tokens",
        "compute_from",
        "tail_tokens",
        "min_spliced_tokens",
        "foreign_tokens",
        "unseen_percent",
    ],
)
def test_request_options_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=-1: must be an integer of [01] or more, or left out"):
        PlanOptions(**{name: -1})


def test_unknown_keys_are_errors() -> None:
    with pytest.raises(msgspec.ValidationError, match="chunk_size"):
        msgspec.json.decode(b'{"chunk_size": 1}', type=CoreConfig)
