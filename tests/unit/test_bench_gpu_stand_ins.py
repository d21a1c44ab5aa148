"""The stand-ins for packages that a bare GPU machine lacks do what the packages do, as far as they are used."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from pic_bench.gpu import stand_ins

MODULES = {module.__name__: module for make in (stand_ins._msgspec, stand_ins._fastcdc) for module in make()}


def test_nothing_is_replaced_where_the_packages_are() -> None:
    assert stand_ins.install() == []
    assert stand_ins.installed() == []


def structs_of(package: Any) -> tuple[type, type]:
    """The same two structs, made with msgspec or with its stand-in."""

    class Inner(package.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        samples: list[float]

    class Outer(package.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        ways: dict[str, Inner]
        limit: float = 1.0
        watts: float | None = None
        notes: list[str] = []  # noqa: RUF012
        renamed: int = package.field(default=3, name="in")

    # Annotations are looked up in the module.
    globals()["Inner"] = Inner
    return Inner, Outer


def test_structs_are_written_and_read_alike() -> None:
    texts = []
    for package in (msgspec, MODULES["msgspec"]):
        inner, outer = structs_of(package)
        value = outer(ways={"full": inner(samples=[1.5, 2.0])}, renamed=4)
        texts.append(package.json.encode(value))
        assert package.json.decode(texts[0], type=outer) == value
        assert package.structs.replace(value, limit=2.0).limit == 2.0
        fields = package.structs.fields(outer)
        assert [field.name for field in fields] == [*outer.__annotations__]
        assert [field.type for field in fields[1:4]] == [float, float | None, list[str]]
        value.notes.append("mine")
        assert outer(ways={}).notes == []
        with pytest.raises(AttributeError):
            value.limit = 3.0
        with pytest.raises(ValueError, match="unknown"):
            package.json.decode(b'{"ways": {}, "unknown": 1}', type=outer)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("seed", range(3))
def test_cuts_depend_on_content_and_keep_their_bounds(seed: int) -> None:
    cut = MODULES["fastcdc"].fastcdc
    text = np.random.default_rng(seed).integers(0, 256, 40_000, dtype=np.uint8).tobytes()
    ends = []
    for before in (b"", b"x" * 777):
        chunks = list(cut(before + text, 128, 256, 1_024))
        assert [chunk.offset for chunk in chunks[1:]] == [chunk.offset + chunk.length for chunk in chunks[:-1]]
        assert all(128 <= chunk.length <= 1_024 for chunk in chunks[:-1])
        assert 180 <= np.mean([chunk.length for chunk in chunks]) <= 380
        ends.append({chunk.offset + chunk.length - len(before) for chunk in chunks})
    assert len(ends[0] & ends[1]) > 0.9 * len(ends[0])
