"""The guard on texts as tokenizers cut them: pieces of words, single digits and signs."""

from __future__ import annotations

import itertools
import re
from functools import cache

import numpy as np
import pytest

from sglang_pic.core import MESSAGE_BREAK, ContentIndex, CoreConfig, Lexicon, Tokens, as_tokens
from sglang_pic.core.plan import DropReason, Plan
from sglang_pic.core.tokens import common_len
from tests.helpers.core_builders import plan_of, publish_rows

BREAK = "\x1e"
"""In texts: a token that opens or closes a message."""
_PIECES = re.compile(rf"\\n| ?[^\W\d_]{{1,4}}|{BREAK}|.", re.S)
_IDS: dict[str, int] = {}


def cut(text: str) -> Tokens:
    return as_tokens([_IDS.setdefault(piece, len(_IDS)) for piece in _PIECES.findall(text)])


@cache
def prose(seed: int, num_words: int = 120) -> str:
    """Lines of ten words that are in no other text."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice([*"bcdfghjklmnpqrstvz"], 7)) for _ in range(num_words)]
    return "".join(f"{' '.join(words[at : at + 10])}.\n" for at in range(0, num_words, 10))


def second_plan(old: str, new: str, *others: str) -> tuple[Plan, str]:
    """Of the last prompt behind the others, and it."""
    return plan_with(CoreConfig(), old, *others, new), new


def plan_with(config: CoreConfig, *texts: str) -> Plan:
    prompts = [cut(text) for text in texts]
    lexicon = Lexicon([MESSAGE_BREAK if piece == BREAK else piece for piece in _IDS])
    index = ContentIndex(config, lexicon=lexicon)
    for tokens in prompts[:-1]:
        publish_rows(index, "a", tokens, [(0, len(tokens))])
    known = max(common_len(tokens, prompts[-1]) for tokens in prompts[:-1])
    return plan_of(index, prompts[-1][:known], prompts[-1][known:])


def is_spliced(made: tuple[Plan, str], words: str) -> bool:
    """Whether a token of the first place with these words is spliced."""
    (plan, text), at = made, made[1].index(words)
    start, end = len(cut(text[:at])), len(cut(text[: at + len(words)]))
    return any(run.target_start < end and run.target_end > start for run in plan.runs)


HEAD, BODY, MORE, REST = prose(1, 30), prose(2), prose(3), prose(4)
LAST = f"{REST}{prose(12, 400)}What now?\n"
UUIDS = "3f2b8c1e-9d47-4a6b-8e2f-1c5d7b9a0e34", "a81c09d7-52be-47f3-9c10-6e2d84fb7a95"
HASHES = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "2c26b46b68ffc68ff99b453c1d30413413422d70"
SAID = {
    "an id": (f"Session: {UUIDS[0]}", f"Session: {UUIDS[1]}", f"The folder of {UUIDS[0]} is locked."),
    "the end of an id": (
        f"Session: {UUIDS[0]}",
        f"Session: {UUIDS[0][:-3]}995",
        f"The folder of {UUIDS[0]} is locked.",
    ),
    "a hash": (f"HEAD is at {HASHES[0]}", f"HEAD is at {HASHES[1]}", f"Run git show {HASHES[1]} to see it."),
    "a time with all digits": (
        "Now: 2026-01-05T18:27:33.123456",
        "Now: 2026-01-05T18:28:33.123456",
        "It began 2026-01-05T18:27:33.123456 there.",
    ),
    "two parts of a time": ("Due 2026-11-26T11:46:22Z", "Due 2026-12-26T10:30:17Z", "It is due 2026-11-26T11:46:22Z."),
    "two parts of an address": ("Host 10.20.181.126", "Host 12.20.181.198", "Ping 10.20.181.126 first."),
    "a number and its unit": ("Wait 30 seconds", "Wait 45 seconds", "It sleeps 30s then."),
    "a name after a break in JSON": ("user: Bobb", "user: Anna", '{"log": "x\\nBobb\\n"}'),
    "a number in a list": ("[1,45,3]", "[1,46,3]", "We count 45 of them."),
    "a number of CSV": ("alice,45,open", "alice,46,open", "We count 45 of them."),
    "a number beside a list": ("width=45", "width=46", "It is in [1,45,3] as well."),
    "a port": ("10.0.0.5:8080", "10.0.0.5:9090", "It listens on 8080 there."),
    "an id in a path": ("GET /users/4512/orders", "GET /users/4513/orders", "User 4512 has paid."),
    "thousands": ("It costs 1,500 euro", "It costs 1,600 euro", "We pay 1,500 for it."),
    "thousands without a comma": ("It costs 1,500 euro", "It costs 1,600 euro", "We pay 1500 for it."),
    "thousands with a comma": ("It costs 1500 euro", "It costs 1600 euro", "We pay 1,500 for it."),
    "millions": ("It has 1.250.000 rows", "It has 1.750.000 rows", "We keep 1250000 of them."),
    "a price in JSON": ("price: 150", "price: 160", 'It said {"amount": 150.00} there.'),
    "thousands with cents": ("It costs $1,500.00", "It costs $1,600.00", "We pay 1500 for it."),
    "a decimal": ("The rate is 12.50", "The rate is 13.50", "It rose from 12.5 since."),
    "a date of a stamp": ("Now: 2026-01-05T18:27:33Z", "Now: 2026-01-06T11:28:33Z", "It came on 2026-01-05 there."),
    "a time of a stamp": ("Now: 2026-01-05T18:27:33Z", "Now: 2026-01-05T11:28:33Z", "It came at 18:27 there."),
    "a clock of 12 hours": ("Now: 18:27", "Now: 11:28", "It came at 6:27 pm there."),
    "a German date": ("Today: 2026-01-05", "Today: 2026-01-06", "Es war am 5.1.2026 da."),
    "an ISO date": ("Today: 01/05/2026", "Today: 01/06/2026", "See log_20260105 there."),
    "a version": ("Version v1.2.3", "Version v1.3.0", "It needs 1.2.3 or so."),
    "digits of full width": ("価格 \uff11\uff15\uff10\uff10", "価格 \uff11\uff16\uff10\uff10", "We pay 1500 there."),
    "a sign that folds to letters": ("Brand: Acme\u2122 soap", "Brand: Bolt\u2122 soap", "It is made by Acme there."),
    "a sign of full width": ("Port\uff1a45", "Port\uff1a46", "It has 45 there."),
    "kana of half width": ("Name: \uff76\uff84\uff73", "Name: \uff7b\uff84\uff73", "It is \uff76\uff84\uff73 there."),
    "a digit in parentheses": ("Item \u2474 open", "Item \u2475 open", "It is \u2474 there."),
    "a date in words": ("Today: 2026-01-05", "Today: 2026-01-06", "It came on January 5, 2026 there."),
    "a short date in words": ("Today: 2026-01-05", "Today: 2026-01-06", "It came on 5 Jan there."),
    "a date with an ordinal": ("Due: 1/5/2026", "Due: 1/6/2026", "It is due on the 5th of January there."),
    "the number of a date in words": (
        "Today: January 5, 2026",
        "Today: January 6, 2026",
        "It came on 2026-01-05 there.",
    ),
    "the month of a date in words": ("Today: January 5, 2026", "Today: March 5, 2026", "It came on 2026-01-05 there."),
    "a date of a log": ("[05/Jan/2026:18:27:33]", "[06/Jan/2026:11:28:33]", "It came on 2026-01-05 there."),
    "a day and a month": ("Today: 2026-01-15", "Today: 2026-01-16", "It came on 1/15 there."),
    "an hour": ("Meet at 14:00", "Meet at 15:00", "We meet at 2 pm there."),
    "an hour in the afternoon": ("Meet at 2 PM", "Meet at 3 PM", "We meet at 14:00 there."),
    "a part of a path": ("Out: /data/run_12/out.log", "Out: /data/run_13/out.log", "Look at run_12 there."),
    "a file without its ending": ("Out: /data/out_12.log", "Out: /data/out_13.log", "Look at out_12 there."),
    "a name with a number": ("Running job-42", "Running job-43", "Look at job 42 there."),
    "a name and a number": ("Uses Python 3.11", "Uses Python 3.12", "Run python3.11 there."),
    "a joined number": ("Model: llama-3.1", "Model: llama-3.2", "It is Llama 3.1 there."),
    "a joined unit": ("timeout: 30s", "timeout: 45s", "It waits 30 seconds there."),
    "a user of an address": ("User: ann42@example.com", "User: ann43@example.com", "Ask ann42 there."),
    "a host of a domain": ("Host: db-01.example.com", "Host: db-02.example.com", "Ask db-01 there."),
    "a line of a file": ("Error at main.py:45", "Error at main.py:46", "See line 45 there."),
    "a number behind a key": ("limit:45", "limit:46", "We allow 45 there."),
    "an address without its port": ("Addr 10.0.0.5:8080", "Addr 10.0.0.6:8080", "Ping 10.0.0.5 there."),
    "camel case": ("Call get_user", "Call fetch_item", "See getUser there."),
    "an id without dashes": (f"Id: {UUIDS[0]}", f"Id: {UUIDS[1]}", f"See {UUIDS[0].replace('-', '')} there."),
    "the head of an id": (f"Id: {UUIDS[0]}", f"Id: {UUIDS[1]}", f"See {UUIDS[0][:8]} there."),
    "a short hash": (f"HEAD is {HASHES[0]}", f"HEAD is {HASHES[1]}", f"See {HASHES[0][:7]} there."),
    "thousands with a letter": ("It costs 1500", "It costs 1600", "We pay 1.5k there."),
    "a letter for thousands": ("It costs 1.5k", "It costs 1.6k", "We pay 1500 there."),
    "a decimal comma": ("Total: 12,50", "Total: 13,50", "We pay 12.50 there."),
    "a number in words": ("You have 3 tries", "You have 4 tries", "We get three tries there."),
    "a short version": ("Python 3.11.4", "Python 3.12.1", "It is Python 3.11 there."),
    "signs that fold to more letters": (
        "Kunde: Großmann",
        "Kunde: Weißbach",
        "Herr Großmann kam um neun.",
    ),
    "a number in Chinese": ("价格是45元。", "价格是46元。", "因为是45元所以我们买了很多。"),
    "a name in Chinese": ("客户是王小明。", "客户是李大伟。", "今天王小明已经付款了。"),
    "one Chinese name of many fields": (
        "客户是王小明。\na: 1\nb: 2\nc: 3",
        "客户是李大伟。\na: 4\nb: 5\nc: 6",
        "今天王小明已经付款了。",
    ),
    "a relation": ("if a < b go left", "if a > b go left", "Then the robot goes."),
    "a sign before a number": ("It is -5 there", "It is 5 there", "Then the robot goes."),
    "a picture": ("Deploy allowed ✅", "Deploy allowed ❌", "Then the robot goes."),
    "frequent words": (
        "The customer is Anna Mara Lope here",
        "The customer is John Paul Smit here",
        "\n".join(f"Anna Mara Lope asked for {word} today." for word in prose(5, 10).split()),
    ),
}
"""What stood in the field, what stands there now, and what is said further on and has to be computed."""


@pytest.mark.parametrize("name", SAID)
def test_what_names_a_value_is_computed_however_it_is_written(name: str) -> None:
    old, new, said = SAID[name]
    made = second_plan(*(f"{HEAD}{field}\n{BODY}{said}\n{MORE}{LAST}" for field in (old, new)))
    assert made[0].changed_fields
    assert not is_spliced(made, said.partition("\n")[0])


def test_a_value_that_is_frequent_in_another_form_is_computed_where_it_was() -> None:
    totals = "".join(f"{prose(60 + at, 10)[:-2]}, total 5.00\n" for at in range(9))
    said = "We count 5 of them."
    made = second_plan(*(f"{HEAD}Total: {value}\n{BODY}{said}\n{MORE}{totals}{LAST}" for value in (5, 6)))
    assert made[0].num_spliced
    assert not is_spliced(made, said)


def test_too_many_places_of_other_forms_do_not_end_the_search_for_values() -> None:
    numbers = "".join(f"{at * 10_007} {at * 10_009}\n" for at in range(1, 600))
    lines = [prose(80 + at, 20) for at in range(20)]
    stamped = [
        "".join(f"{day}:{at + 10}:33Z {line}" for at, line in enumerate(lines))
        for day in ("2026-07-05T18", "2026-08-06T11")
    ]
    plan, _ = second_plan(*(f"{stamps}{numbers}{LAST}" for stamps in stamped))
    assert DropReason.BUDGET not in plan.dropped
    assert plan.num_spliced


UNSAID = {
    "a mark": ("Hello there!", "Hello there."),
    "a line": ("-----", "------"),
    "a line of a table": ("|---|---|", "|----|---|"),
    "a tree": ("├── src", "└── src"),
    "the date of a clock": ("2026-01-05 10:12", "2026-01-05 10:13"),
    "a clock with a common unit": ("It is 11:58 am", "It is 12:03 pm"),
    "an article": ("Ask Bob Hill\na: 1\nb: 2\nc: 3", "Ask the Mayor\na: 4\nb: 5\nc: 6"),
}


@pytest.mark.parametrize("name", UNSAID)
def test_what_says_nothing_costs_nothing(name: str) -> None:
    said = "I am here on 2026-01-05. The shop is there. " + "The man and the dog are in the house. " * 3
    plan, text = second_plan(*(f"{HEAD}{field}\n{BODY}{said}\n{MORE}{LAST}" for field in UNSAID[name]))
    assert plan.num_spliced > len(cut(text)) / 2


CLOCK = "It is 18:27 now.", "It is 18:42 now."
NAMED = "Since it is 18:27 the shop is open."


@pytest.mark.parametrize("values", [("18:27", "18:42"), UUIDS], ids=["clock", "id"])
@pytest.mark.parametrize("is_added", [False, True], ids=["removed", "added"])
def test_a_field_before_text_that_was_added_or_removed_is_found(is_added: bool, values: tuple[str, str]) -> None:
    long = prose(6, 400)
    named = f"Since {values[0]} it is open."
    old, new = ("", long) if is_added else (long, "")
    made = second_plan(f"{HEAD}Now: {values[0]}\n{BODY}{old}{MORE}{named}\n{prose(7)}{LAST}",
                       f"{HEAD}Now: {values[1]}\n{BODY}{new}{MORE}{named}\n{prose(7)}{LAST}")  # fmt: skip
    assert made[0].num_spliced
    assert not is_spliced(made, named)


def test_text_of_another_role_is_another_text_and_no_value() -> None:
    """A context with longer changes, and text between them and the run: its short ones are no fields either."""
    roles = [f"You are {role}.\n{prose(seed, 20)}" for role, seed in (("Ann", 10), ("Bea", 11))]
    made = second_plan(f"{HEAD}{roles[0]}{BODY}{prose(6, 400)}{MORE}{prose(7)}{LAST}",
                       f"{HEAD}{roles[1]}{BODY}{MORE}{prose(7)}{LAST}")  # fmt: skip
    assert not any(is_spliced(made, line) for line in roles[1].splitlines())
    assert all(end <= len(cut(made[1].partition(MORE)[0])) for _, end in made[0].changed_fields)


@pytest.mark.parametrize("between", range(20, 70, 4))
def test_two_fields_are_found_however_much_is_between_them(between: int) -> None:
    notes = [prose(seed, 30).replace(".\n", " ") for seed in (8, 9)]
    made = second_plan(*(f"{HEAD}{now}\n{prose(2, between)}{note}\n{BODY}{NAMED}\n{MORE}{LAST}"
                         for now, note in zip(CLOCK, notes, strict=True)))  # fmt: skip
    assert not is_spliced(made, "Since it is 18:27")


@pytest.mark.parametrize("mark", [f"{BREAK}", f"{BREAK}\n{BREAK}user\n"], ids=["one token", "role"])
@pytest.mark.parametrize(
    "tasks", [("Play a song.", "Sing it now."), ("0 1 " * 24, "1 1 0 " * 16)], ids=["words", "grid"]
)
def test_a_value_at_the_end_of_a_message_is_a_field_whatever_follows(mark: str, tasks: tuple[str, str]) -> None:
    made = second_plan(*(f"{HEAD}{now[:-1]}{mark}{task}\n{BODY}{NAMED}\n{MORE}{LAST}"
                         for now, task in zip(CLOCK, tasks, strict=True)))  # fmt: skip
    assert made[0].num_spliced
    assert not is_spliced(made, "Since it is 18:27")


def test_messages_that_are_replaced_are_no_field() -> None:
    mark = f"{BREAK}\n{BREAK}user\n"
    tasks = f"Play.{BREAK}\n{BREAK}tool\nIt plays.", "Sing it now."
    made = second_plan(*(f"{HEAD}{mark}{task}{mark}{BODY}{NAMED}\n{MORE}{LAST}" for task in tasks))
    assert made[0].changed_fields == ()
    assert is_spliced(made, "Since it is 18:27")


@pytest.mark.parametrize("number", [9, 7], ids=["the same", "another"])
def test_documents_of_several_prompts_are_computed_whatever_number_is_before_them(number: int) -> None:
    head = "Here is the next document of our knowledge base with the number {}\n"
    documents = [prose(20 + at, 60) for at in range(4)]
    others = [f"{prose(30 + at, 200)}{head.format(9)}{document}" for at, document in enumerate(documents)]
    asked = "".join(f"{head.format(number)}{document}" for document in documents)
    plan, _ = second_plan(others[0], f"{prose(50, 200)}{asked}{prose(12, 400)}", *others[1:])
    assert plan.runs == ()
    assert plan.dropped[DropReason.REORDERED] == 4


def test_looking_for_many_words_that_begin_alike_ends_soon() -> None:
    """Removed texts say many words, and a text of one letter may begin all of them at each of its places."""
    letters = " a" * 20_000
    words = ["a" + "".join(each) for each in itertools.product("bcdfgh", "bcdfgh", "bcdfgh")]
    lines = [" ".join(words[at : at + 20]) + "\n" for at in range(0, 200, 20)] * 6
    kept = [prose(40 + number, 20) for number in range(60)]
    plan, _ = second_plan(HEAD + "".join(f"{line}{text}" for line, text in zip(lines, kept, strict=True)) + letters,
                          HEAD + "".join(kept) + letters)  # fmt: skip
    assert plan.dropped[DropReason.BUDGET]
    assert plan.runs == ()


def test_a_document_from_which_the_guard_has_cut_lines_is_one_of_two() -> None:
    """A second pass computes all of one document, and of two there is none to choose."""
    notes = [prose(seed, 100) for seed in range(21, 26)]
    cut_up, *others = f"{notes[0]}Bobb has seen it.\n{notes[1]}Bobb was there.\n{notes[2]}", *notes[3:]
    two, three = (
        plan_with(CoreConfig(reordered="attend"), f"user: Bobb\n{HEAD}{''.join(old)}{REST}", "user: Anna\n" + new)
        for old, new in (
            ((cut_up, others[0]), f"{HEAD}{others[0]}{cut_up}{BODY}"),
            ((cut_up, *others), f"{HEAD}{others[1]}{others[0]}{cut_up}{BODY}"),
        )
    )
    assert (two.conditional, two.dropped[DropReason.REORDERED]) == ((), 4)
    assert [run.is_conditional for run in three.runs] == [True] * 5
    whole, (start, end) = three.choices[-1], three.most_again[0]
    assert len(three.choices) == 3
    assert (whole.start, whole.end) == (start, end) == (three.runs[2].target_start - 64, three.runs[4].target_end)
    assert three.after_second_pass().runs == three.runs[:2]
