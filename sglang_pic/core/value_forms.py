"""Other ways to write a value: `1,500` and `1500.00`, `2026-01-05T18:27:33Z` and `05.01.2026`, `v1.2` and `1.2`.

Not known are names of months and weekdays, units (`1.5k`), per cent as fractions, and numbers in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PLAIN = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))?")
_GROUPED = re.compile(
    r"(?<![0-9])([0-9]{1,3}([,.'\u2019_ \u00a0\u202f])[0-9]{3}(?:\2[0-9]{3}){0,4})(?:[.,]([0-9]{1,2}))?(?![0-9])"
)
_YEAR_FIRST = re.compile(r"(?<![0-9])([12][0-9]{3})([-/.]?)([0-9]{2})\2([0-9]{2})(?![0-9])")
_YEAR_LAST = re.compile(r"(?<![0-9])([0-9]{1,2})([-/.])([0-9]{1,2})\2([12][0-9]{3})(?![0-9])")
_TIME = re.compile(r"(?<![0-9:])([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?(?![0-9:])")
_VERSION = re.compile(r"v?([0-9]+(?:\.[0-9]+)+)")
_NOT_DIGITS = re.compile("[^0-9]+")


def grouped_numbers(text: str, start: int, end: int) -> list[str]:
    """The numbers with separated thousands that overlap `[start, end)` of a text."""
    return [found[0] for found in _GROUPED.finditer(text) if found.end() > start and found.start() < end]


def groups_of(number: str) -> set[str]:
    """The words of such a number."""
    return {*re.split(r"[^0-9.]", number), *_NOT_DIGITS.split(number)}


def other_forms(word: str) -> set[str]:
    """How else a number, a version, or the date or the time in a folded word may be written; `1.500` may be one and a
    half, too."""
    forms = set[str]()
    if (plain := _PLAIN.fullmatch(word)) is not None:
        forms.update(_numbers(plain[1], plain[2] or ""))
    if (grouped := _GROUPED.fullmatch(word)) is not None:
        forms.update(_numbers(_NOT_DIGITS.sub("", grouped[1]), grouped[3] or ""))
    if (version := _VERSION.fullmatch(word)) is not None:
        forms.update((version[1], f"v{version[1]}"))
    if (date := _YEAR_FIRST.search(word)) is not None:
        forms.update(_dates(date[1], date[3], date[4]))
    if (date := _YEAR_LAST.search(word)) is not None:
        forms.update(_dates(date[4], date[3], date[1]))
        forms.update(_dates(date[4], date[1], date[3]) if date[2] == "/" else ())
    if (time := _TIME.search(word)) is not None:
        forms.update(_times(int(time[1]), time[2], time[3]))
    return forms - {word}


def _numbers(whole: str, fraction: str) -> Iterator[str]:
    if len(whole) > 1 and whole[0] == "0":
        # An id.
        return
    fraction = fraction.rstrip("0")
    grouped = f"{int(whole):,}"
    ends = [f".{fraction}"] if fraction else ["", ".0", ".00"]
    ends += [f".{fraction}0"] if len(fraction) == 1 else []
    for end in ends:
        yield f"{whole}{end}"
        yield f"{grouped}{end}"
    if not fraction:
        yield from (grouped.replace(",", sign) for sign in ".'")


def _dates(year: str, month: str, day: str) -> Iterator[str]:
    if 1 <= int(month) <= 12 and 1 <= int(day) <= 31:
        yield from (f"{year}{sign}{month:0>2}{sign}{day:0>2}" for sign in ("-", "/", ".", ""))
        for few, many in ((int(day), int(month)), (f"{day:0>2}", f"{month:0>2}")):
            yield from (f"{few}.{many}.{year}", f"{few}/{many}/{year}", f"{many}/{few}/{year}")


def _times(hour: int, minute: str, second: str | None) -> Iterator[str]:
    """On a clock of 12 hours, too."""
    for each in {hour, (hour + 11) % 12 + 1}:
        for written in (f"{each}:{minute}", f"{each:02}:{minute}"):
            yield written
            yield f"{written}:{second or '00'}"
