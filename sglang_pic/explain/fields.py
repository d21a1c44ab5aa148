"""What a changed text is: a clock, an id, a number, an image, a role, a thought, or keys in another order."""

from __future__ import annotations

import json
import re

from sglang_pic.explain.cause import Cause

_MONTHS = r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sep(?:t(?:ember)?)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"  # noqa: E501
_DAYS = r"mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:r?s(?:day)?)?|fri(?:day)?|sat(?:urday)?|sun(?:day)?"
_CLOCK = re.compile(
    r"\d{1,2}:\d{2}(?!\d)"  # 10:31, 10:31:07.250
    r"|\d{1,2} ?(?:時|时|시|点|點|Uhr|ч|h) ?\d{1,2}(?!\d)"  # 14时03分, 14 Uhr 03
    r"|\d{1,2} ?(?:月|월) ?\d{1,2}(?!\d)"  # 6月6日
    r"|\b\d{1,2}(?:\.|er)? (?:de )?[^\W\d_]{3,10}\.? (?:de )?(?:19|20)\d{2}\b"  # 6 de junio de 2026
    r"|\b\d+ ?(?:d|h|min)\b"  # 3d, as ages are written
    r"|\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}"  # 2026-01-05
    r"|\b\d{1,2}[-/.]\d{1,2}[-/.]\d{4}\b"  # 05.01.2026
    rf"|\b(?:{_MONTHS})\b\.?\s*\d{{1,4}}|\b\d{{1,2}}(?:[snr][td]|th)?\s+(?:{_MONTHS})\b"
    rf"|\b(?:{_DAYS})\b,?\s+(?:\d|{_MONTHS})"
    r"|\b1[5-9]\d{8}(?:\d{3}|\d{6}|\d{9})?\b"  # seconds since 1970, or parts of them
    r"|\b\d{8}T\d{4,6}"
    r"|\b\d+ (?:second|minute|hour|day|week|month|year)s? ago\b|\bjust now\b|\byesterday\b",
    re.IGNORECASE,
)
_DAY_OR_MONTH = re.compile(rf"(?:{_MONTHS}|{_DAYS})\.?", re.IGNORECASE)
_ABOUT_TIME = re.compile(r"\b(?:time|date|today|now|clock|timestamp|current[ _]?day|as of|o'clock)\b", re.IGNORECASE)
_NUMBER = re.compile(r"[$€£#~+-]?\d[\d.,_\s]*(?:%|[kmgt]i?b?|ms|s|tokens?)?", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", re.IGNORECASE)
_HEX = re.compile(r"(?:0x)?[0-9a-f]{7,}", re.IGNORECASE)
_SHORT_HEX = re.compile(r"[0-9a-f]{3,}", re.IGNORECASE)
_MIXED = re.compile(r"[A-Za-z0-9_+/=.:-]{6,}")
# Letters and digits alternate in `toolu_01M5p3hDr6` more often than in `astropy4`.
_ALTERNATION = re.compile(r"(?<=[A-Za-z_-])\d|(?<=\d)[A-Za-z]")
_ABOUT_ID = re.compile(
    r"(?:\b|_)(?:id|ids|uuid|guid|session|request|trace|nonce|token|hash|sha|commit|key|run)\b[\"'\s:=#(\[]*\Z",
    re.IGNORECASE,
)
_THOUGHT = re.compile(
    r"\s*(?:<(?:seed:)?think(?:ing)?>|\[THINK\]|◁think▷|<\|channel\|>\s*(?:analysis|thought)|thought\n)"
)
_ROLES = {"system", "developer", "user", "assistant", "model", "tool", "function"}
_IMAGE = re.compile(r"\[(?:input_)?(?:image|video|audio|file)\w* [0-9a-f]{8}$")
_CONTEXT_CHARS = 40
"""Characters before a value in which a word may say what it is."""
_CLOCK_CHARS = 24
"""Characters on either side that may have the rest of the clock."""
# A value ends where text around it does, or after 48 characters: a UUID has 36.
_LEFT = re.compile(r"[^\s\"'`<>(){}\[\],;=|]{0,48}\Z")
_VALUE = re.compile(r"[^\s\"'`<>(){}\[\],;=|]+")
_RIGHT = re.compile(r"\A[^\s\"'`<>(){}\[\],;=|]{0,48}")


def field_around(before: str, changed: str, after: str) -> str:
    """The whole value of which `changed` is the part that differs: `5` of `2026-01-05` gives `2026-01-05`."""
    left = _LEFT.search(before)
    right = _RIGHT.search(after)
    # A change that begins or ends with a space is not the middle of a word.
    head = "" if left is None or changed[:1].isspace() else left.group()
    tail = "" if right is None or changed[-1:].isspace() else right.group()
    return f"{head}{changed}{tail}"


def first_value(text: str) -> str:
    """The beginning of a changed text, up to where its first value ends; it may be empty."""
    found = _RIGHT.search(text)
    return found.group() if found else ""


def cause_of_several(before: str, old: str, new: str) -> Cause | None:
    """The cause of the first of several changed fields that is a clock or an id; `FIELD` if only digits differ."""
    first = cause_of(before, first_value(old.lstrip()), first_value(new.lstrip()), "")
    if first in (Cause.CLOCK, Cause.ID):
        return first
    olds, news = _VALUE.findall(old), _VALUE.findall(new)
    if len(olds) == len(news):
        found = [cause_of("", *pair, "") for pair in zip(olds, news, strict=True) if pair[0] != pair[1]]
        named = next((kind for kind in found if kind in (Cause.CLOCK, Cause.ID)), None)
        if named is not None:
            return named
    return Cause.FIELD if _only_digits_differ(old, new) else None


def cause_of(before: str, old: str, new: str, after: str) -> Cause | None:
    """`CLOCK`, `ID`, or `FIELD` for a number, if such a value changed between `before` and `after`; else None."""
    values = [field_around(before, text, after) for text in (old, new)]
    # A word around the value says what it is: `now: 7`, `7 o'clock`.
    context = before[-_CONTEXT_CHARS:]
    stripped = [value.strip(" \n\t\"'`.,:;()[]{}<>") for value in values]
    if any(map(_CLOCK.search, values)) or _is_part_of_clock(before, old, new, after):
        return Cause.CLOCK
    numeric = [bool(_NUMBER.fullmatch(value)) or not value for value in stripped]
    if all(numeric) and any(stripped):
        return Cause.CLOCK if _ABOUT_TIME.search(context) else Cause.FIELD
    if (
        any(map(_is_id, stripped))
        or _are_hex(*stripped)
        or (_ABOUT_ID.search(context) and any(map(_has_digit, stripped)))
    ):
        return Cause.ID
    if _only_digits_differ(*stripped):
        return Cause.FIELD
    return None


def is_role(old: str, new: str) -> bool:
    """Whether a message changed its role."""
    return old.strip() in _ROLES and new.strip() in _ROLES


def cause_of_image(before: str, old: str, new: str) -> Cause | None:
    """`FIELD` if an image changed, `REMOVED` if a text is in its place; None if there was no image."""
    are_images = [bool(_IMAGE.search(before + text.split("]")[0])) for text in (old, new)]
    return None if not are_images[0] else Cause.FIELD if are_images[1] else Cause.REMOVED


def cause_of_json(before: str, old: str, new: str) -> Cause | None:
    """The cause if the line of the break has a JSON object with the same values in both texts.

    `REORDERED` if its keys are in another order, `ANSWER` if it is only written in another way (spaces, `\\u00e9`).
    """
    head = before.rsplit("\n", 1)[-1]
    texts = []
    for line in (head + text.split("\n", 1)[0] for text in (old, new)):
        start = line.find("{")
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(line, max(0, start))
        except (ValueError, RecursionError):
            return None
        texts.append((value, line[start:end]))
    if texts[0][0] != texts[1][0] or texts[0][1] == texts[1][1]:
        return None
    # Dumped, a value keeps the order of its keys.
    return Cause.REORDERED if json.dumps(texts[0][0]) != json.dumps(texts[1][0]) else Cause.ANSWER


def is_thought(before: str, old: str, new: str) -> bool:
    """Whether one text has a thought, or its end, and the other continues without it."""
    if bool(_THOUGHT.match(old)) != bool(_THOUGHT.match(new)):
        return True
    # Both may open a thought: one is empty, because the template drops the thought.
    is_open = bool(_THOUGHT.match(before[-12:].lstrip("\n")) or _THOUGHT.match(old)) and not before.endswith("</think>")
    texts = [re.sub(r"^\s*<think>", "", text).lstrip() for text in (old, new)]
    return is_open and sum(text.startswith("</think>") for text in texts) == 1


def _is_part_of_clock(before: str, old: str, new: str, after: str) -> bool:
    """Whether a bare number, or a name of a day or month, is part of a clock in its line."""
    bare = all(
        re.fullmatch(r"[\d:.,/\sTZapmAPM-]*", text) or _DAY_OR_MONTH.fullmatch(text.strip(" ,.")) for text in (old, new)
    )
    if not bare or not (old.strip() or new.strip()):
        return False
    head = before[-_CLOCK_CHARS:].rsplit("\n", 1)[-1]
    tail = after[:_CLOCK_CHARS].split("\n", 1)[0]
    for text in (old, new):
        for found in _CLOCK.finditer(f"{head}{text}{tail}"):
            if found.start() < len(head) + len(text) and found.end() > len(head):
                return True
    return False


def _is_id(value: str) -> bool:
    if _UUID.search(value) or (_HEX.fullmatch(value) and _has_digit(value)):
        return True
    return any(
        _has_digit(word) and len(_ALTERNATION.findall(word)) >= 3
        for word in _MIXED.findall(value)
        if not word.startswith("http")
    )


def _are_hex(old: str, new: str) -> bool:
    """Two short hexadecimal values of one length; a word such as `face` alone is none."""
    both = [old.rpartition(".")[2], new.rpartition(".")[2]]
    if len(both[0]) != len(both[1]) or not all(map(_SHORT_HEX.fullmatch, both)):
        return False
    return any(_has_digit(one) and not one.isdigit() for one in both)


def _has_digit(value: str) -> bool:
    return any(sign.isdigit() for sign in value)


def _only_digits_differ(old: str, new: str) -> bool:
    masked = [re.sub(r"\d+", "#", value) for value in (old, new)]
    return masked[0] == masked[1] and "#" in masked[0]
