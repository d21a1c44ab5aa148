"""Other ways to write a value: `1,500` and `1.5k`, `2026-01-05T18:27:33Z` and `Jan 5`, `/data/job-42.log` and `job 42`.

Not known are weekdays, per cent as fractions, and months in other languages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PLAIN = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))?([km]?)")
_GROUPED = re.compile(
    r"(?<![0-9])([0-9]{1,3}([,.'\u2019_ \u00a0\u202f])[0-9]{3}(?:\2[0-9]{3}){0,4})(?:[.,]([0-9]{1,2}))?(?![0-9])"
)
_WITH_COMMA = re.compile(r"(?<![0-9,])([0-9]{1,15})(),([0-9]{1,2})(?![0-9,])")
_YEAR_FIRST = re.compile(r"(?<![0-9])([12][0-9]{3})([-/.]?)([0-9]{2})\2([0-9]{2})(?![0-9])")
_YEAR_LAST = re.compile(r"(?<![0-9])([0-9]{1,2})([-/.])([0-9]{1,2})\2([12][0-9]{3})(?![0-9])")
_MONTHS = re.findall("[a-z]+", "january february march april may june july august september october november december")
_MONTH = "|".join(f"{name[:3]}(?:{name[3:]})?" for name in _MONTHS)
_DAY = "([0-9]{1,2})(?:[snrt][tdh])?"
_MONTH_AND_DAY = rf"({_MONTH})[ ./-]{{1,2}}{_DAY}|{_DAY}[ ./-]{{1,2}}(?:of )?({_MONTH})"
_WITH_MONTH = re.compile(rf"\b(?:{_MONTH_AND_DAY})\b(?:[ ,./-]{{1,2}}([12][0-9]{{3}})\b:?)?", re.I)
_TIME = re.compile(r"(?<![0-9:])([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?(?![0-9:])")
_HOUR = re.compile(r"(?<![0-9:.])([0-9]{1,2}) ?[ap]\.?m\b", re.I)
_NAME_AND_NUMBER = re.compile(r"(?<![^\W\d_])([^\W\d_]{2,})[-_ ]?([0-9]+(?:\.[0-9]+)*)(?![^\W_])")
_APART = _GROUPED, _WITH_COMMA, _WITH_MONTH, _HOUR, _NAME_AND_NUMBER
_VERSION = re.compile(r"v?(([0-9]+\.[0-9]+)(?:\.[0-9]+)*)")
_WITH_UNIT = re.compile(r"([0-9][0-9.]*[0-9])[^\W\d_]+")
_HASH = re.compile("[0-9a-f]{32,64}")
# Between the parts of a path, of an address, of a place in a file.
_BETWEEN = re.compile(r"[/:@+]|\.(?![0-9])|(?<![0-9])\.")
_PART = re.compile(r"[^\W_][-\w.]*[^\W_]")
_NOT_DIGITS = re.compile("[^0-9]+")
_COUNTS = re.findall("[a-z]+", "two three four five six seven eight nine ten eleven twelve")


def may_have_forms(word: str) -> bool:
    """Whether a folded word or a text with it may be written otherwise: it has digits or signs, or is a month."""
    return not word.isalpha() or re.fullmatch(_MONTH, word) is not None


def written_apart(text: str, start: int, end: int) -> list[str]:
    """What overlaps `[start, end)` of a text, has several words, and has other forms."""
    found = (each for pattern in _APART for each in pattern.finditer(text))
    return [each[0].casefold() for each in found if each.end() > start and each.start() < end]


def words_of(text: str) -> set[str]:
    """The words of such a text."""
    return {*re.findall(r"\w+(?:\.\w+)*", text), *_NOT_DIGITS.split(text)}


def other_forms(text: str) -> set[str]:
    """How else a folded word or what is written apart may be written; `1.500` may be one and a half, too.

    A form of two words is written where the second one follows the first.
    """
    forms = {*_parts(text)}
    if (number := _PLAIN.fullmatch(text)) is not None:
        zeros = ("", "k", "m").index(number[3]) * 3
        digits = (number[2] or "").ljust(zeros, "0")
        forms.update(_numbers(number[1] + digits[:zeros], digits[zeros:]))
    if (number := _GROUPED.fullmatch(text) or _WITH_COMMA.fullmatch(text)) is not None:
        forms.update(_numbers(_NOT_DIGITS.sub("", number[1]), number[3] or ""))
    if (version := _VERSION.fullmatch(text)) is not None:
        forms.update((version[1], f"v{version[1]}", version[2]))
    if (date := _YEAR_FIRST.search(text)) is not None:
        forms.update(_dates(date[1], date[3], date[4]))
    if (date := _YEAR_LAST.search(text)) is not None:
        forms.update(_dates(date[4], date[3], date[1]))
        forms.update(_dates(date[4], date[1], date[3]) if date[2] == "/" else ())
    if (date := _WITH_MONTH.search(text)) is not None:
        month = [name[:3] for name in _MONTHS].index((date[1] or date[4])[:3])
        forms.update(_dates(date[5] or "", f"{month + 1}", date[2] or date[3]))
    if (time := _TIME.search(text)) is not None:
        forms.update(_times(int(time[1]), time[2], time[3]))
    elif (hour := _HOUR.fullmatch(text)) is not None:
        forms.update(_times(int(hour[1]), "00", None))
    return forms - {text}


def _numbers(whole: str, fraction: str) -> Iterator[str]:
    if len(whole) > 1 and whole[0] == "0":
        # An id.
        return
    number, fraction = int(whole), fraction.rstrip("0")
    grouped = f"{number:,}"
    ends = [f".{fraction}"] if fraction else ["", ".0", ".00"]
    ends += [f".{fraction}0"] if len(fraction) == 1 else []
    for end in ends:
        yield from (f"{whole}{end}", f"{grouped}{end}", f"{whole}{end.replace('.', ',')}")
    if not fraction:
        yield from (grouped.replace(",", sign) for sign in ".'")
        yield from (f"{number / 1000:g}k", f"{number / 1_000_000:g}m") if number >= 1000 else ()
        yield from _COUNTS[number - 2 : number - 1] if number >= 2 else ()


def _dates(year: str, month: str, day: str) -> Iterator[str]:
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return
    few, many = (f"{int(month)}", f"{int(day)}"), (f"{month:0>2}", f"{day:0>2}")
    name, nth = _MONTHS[int(month) - 1], f"{few[1]}{'stndrd'[2 * int(day) - 2 : 2 * int(day)] or 'th'}"
    for each in (few[1], many[1], nth):
        yield from (f"{name} {each}", f"{name[:3]} {each}", f"{each} {name}", f"{each} {name[:3]}")
    yield from (sign.join((year, *many)) for sign in ("-", "/", ".", "") if year)
    for m, d in (few, many):
        yield from (f"{m}/{d}", f"{m}-{d}")
        yield from (f"{d}.{m}.{year}", f"{d}/{m}/{year}", f"{m}/{d}/{year}") if year else ()


def _times(hour: int, minute: str, second: str | None) -> Iterator[str]:
    """On a clock of 12 hours, too."""
    for each in {hour, hour % 12, hour % 12 + 12}:
        for written in (f"{each}:{minute}", f"{each:02}:{minute}"):
            yield from (written, f"{written}:{second or '00'}")
        if minute == "00":
            yield from (f"{each}{half}" for half in ("am", "pm", " am", " pm"))


def _parts(text: str) -> Iterator[str]:
    """The parts of a text that have digits, and how else names are joined; not the parts of a time or date."""
    for part in _BETWEEN.split(_TIME.sub("/", _YEAR_FIRST.sub("/", _WITH_MONTH.sub("/", text)))):
        if _PART.fullmatch(part) is not None and not part.isalpha():
            yield from (part, *(re.sub("[-_]", sign, part) for sign in ("", "-", "_")))
            yield from (part[:length] for length in (7, 8, 10, 12) if _HASH.fullmatch(part.replace("-", "")))
        if (named := _NAME_AND_NUMBER.search(part)) is not None:
            yield from (f"{named[1]}{sign}{named[2]}" for sign in (" ", "", "-"))
        if (measured := _WITH_UNIT.fullmatch(part)) is not None:
            yield measured[1]
