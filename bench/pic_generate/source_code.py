"""Seeded program text, such as an agent reads in files and pastes into prompts."""

from __future__ import annotations

import random

from pic_generate.vocabulary import WORDS, CountTokens, approximate_tokens, make_text

_FOLDERS = ("src", "lib", "app", "tests")


def make_code(rng: random.Random, num_tokens: int, count_tokens: CountTokens | None = None) -> str:
    """Functions of Python, `num_tokens` tokens long within a line; the same `rng` state gives the same text.

    Tokens are counted line by line, approximately where no counter is given; a counter that merges tokens over line
    ends sees a few per cent less. The last line may be a comment that fills up.
    """
    count = count_tokens or approximate_tokens
    lines: list[str] = []
    left = num_tokens
    while left > 0:
        for line in _function(rng) if lines else _imports(rng):
            size = count(f"\n{line}")
            if size > left:
                filling = make_text(rng, left - 3, count_tokens)
                return "\n".join([*lines, f"# {filling}"] if filling else lines).strip("\n")
            lines.append(line)
            left -= size
    return "\n".join(lines).strip("\n")


def make_name(rng: random.Random) -> str:
    """A name of two words, as functions and variables have."""
    return f"{rng.choice(WORDS)}_{rng.choice(WORDS)}"


def make_path(rng: random.Random) -> str:
    """The path of a source file, relative to a project."""
    return f"{rng.choice(_FOLDERS)}/{rng.choice(WORDS)}/{make_name(rng)}.py"


def _imports(rng: random.Random) -> list[str]:
    lines = [f"from {rng.choice(WORDS)}.{make_name(rng)} import {make_name(rng)}" for _ in range(rng.randint(1, 3))]
    return [f'"""{_sentence(rng, 8, 20)}"""', "", *lines]


def _function(rng: random.Random) -> list[str]:
    first, second, result = make_name(rng), make_name(rng), make_name(rng)
    lines = ["", "", f"def {make_name(rng)}({first}, {second}={rng.randint(0, 99)}):"]
    lines += [f'    """{_sentence(rng, 6, 14)}"""', f"    {result} = {make_name(rng)}({first})"]
    for _ in range(rng.randint(1, 3)):
        lines += _block(rng, first, second, result)
    lines.append(f"    return {result}")
    return lines


def _block(rng: random.Random, first: str, second: str, result: str) -> list[str]:
    item, helper = rng.choice(WORDS), make_name(rng)
    match rng.randrange(4):
        case 0:
            return [f"    if {second} > {rng.randint(1, 500)}:", f"        {result} = {helper}({first}, {second})"]
        case 1:
            return [f"    for {item} in {first}.{make_name(rng)}():", f"        {result}.{helper}({item}, {second})"]
        case 2:
            text = _sentence(rng, 4, 9).rstrip(".")
            return [f"    if not {result}.{helper}:", f'        raise ValueError(f"{text}: {{{first}!r}}")']
        case _:
            return [f"    {item} = {helper}({result}, {make_name(rng)}={second})", f"    {result} += {item}.{item}"]


def _sentence(rng: random.Random, least: int, most: int) -> str:
    return f"{make_text(rng, rng.randint(least, most)).rstrip('.')}."
