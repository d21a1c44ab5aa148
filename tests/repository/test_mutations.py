"""The table of mutations fits the code: every piece is where it says, every test exists, and the README agrees."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutations import PAGE, ROOT, Invariant, Mutation, read_table, render

INVARIANTS, MUTATIONS = read_table()
IDS = [f"{mutation.invariant}: {mutation.what}" for mutation in MUTATIONS]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=IDS)
def test_the_code_to_mutate_is_there_once_and_the_test_exists(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text("utf8").count(mutation.before) == 1
    assert mutation.before != mutation.after
    file, _, name = mutation.test.partition("::")
    text = (ROOT / file).read_text("utf8")
    assert not name or re.search(rf"^(def {name}\(|{name} = |class {name}\b)", text, re.MULTILINE)


def test_every_invariant_has_two_mutations_or_more() -> None:
    counts = Counter(mutation.invariant for mutation in MUTATIONS)
    assert [invariant.number for invariant in INVARIANTS] == list(range(1, 13)) == sorted(counts)
    assert min(counts.values()) >= 2


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda invariant: invariant.what)
def test_the_owner_of_an_invariant_has_code_that_keeps_it(invariant: Invariant) -> None:
    files = [mutation.file for mutation in MUTATIONS if mutation.invariant == invariant.number]
    assert f"sglang_pic/{invariant.owner}" in files


def test_the_page_has_the_list() -> None:
    page = PAGE.read_text("utf8")
    assert "<!-- invariants: begin -->" in page
    assert page == render(page), "write it by `python -m tests.mutations --page`"


def test_a_mutation_of_what_is_not_there_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    for before, found in (("= 1", 2), ("c = 1", 0)):
        mutation = Mutation(3, "changes", "code.py", before, "= 2", "tests/x.py::test_x")
        with pytest.raises(ValueError, match=f"invariant 3, 'changes': code.py has {found} times"):
            mutation.apply(tmp_path)
    assert Mutation(3, "changes", "code.py", "a = 1", "a = 2", "t").apply(tmp_path) == "a = 1\nb = 1\n"
    assert (tmp_path / "code.py").read_text() == "a = 2\nb = 1\n"
