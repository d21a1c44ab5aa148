"""Speculative decoding with splices: answers are those of the model alone, and the draft guesses as much as before.

The tiny drafts guess some tokens, and how many depends on every row of their KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_pic.adapter.contract import BUILT_FOR, installed_version
from tests.e2e.servers import AT_SHIFT_ZERO, AUDITED
from tests.e2e.serving import Client, greedy, random_tokens, wait_until
from tests.e2e.test_speculation import DRAFTS, TREE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(installed_version() != BUILT_FOR, reason="other versions may refuse servers with a draft"),
]

_NUM_TOKENS = 32
# Below and above the prefill chunk, and one that ends in it.
_PROMPTS = [random_tokens(700 + number, length) for number, length in enumerate((150, 385, 600))]


class Served(NamedTuple):
    """An answer, and how the draft did."""

    ids: list[int]
    num_spliced: int
    num_right: int
    """Tokens of the draft that were accepted."""
    num_rounds: int


def ask(client: Client, prompt: Sequence[int], *, mode: str = "auto") -> Served:
    body = {"input_ids": list(prompt), "sampling_params": greedy(_NUM_TOKENS, pic={"mode": mode})}
    answer = client.post("/generate", {**body, **client.route})
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    right, rounds = meta["spec_num_correct_drafts"], meta["spec_verify_ct"]
    return Served(answer["output_ids"], details.get("pic", 0), right, rounds)


def compare(client: Client, num_right: int | None) -> None:
    """Prompts computed, then spliced from their own chunks in their own context, alone and side by side.

    `num_right` is how many guesses are right at least; None where they are learnt from answers before.
    """
    whole = [ask(client, prompt) for prompt in _PROMPTS]
    assert num_right is None or sum(served.num_right for served in whole) >= num_right
    for prompt, full in zip(_PROMPTS, whole, strict=True):
        assert full.num_spliced == 0
        spliced = ask(client, prompt)
        # All but the sink, a partial page at its end and one at the prompt's.
        assert spliced.num_spliced >= len(prompt) - 32 - 2 * 16
        assert spliced.ids == ask(client, prompt, mode="off").ids == full.ids
        assert num_right is None or spliced._replace(num_spliced=0) == full, "the same guesses are right"
    together = client.generate_all([*_PROMPTS, random_tokens(711, 300)], max_new_tokens=_NUM_TOKENS)
    assert [answer.ids for answer in together[:3]] == [full.ids for full in whole]
    assert all(answer.chunk_hit_tokens for answer in together[:3])
    # From other donors at other places: what was counted happened, and the rows are there for the next turn.
    mixed = [*random_tokens(712, 50), *_PROMPTS[2][40:200], *random_tokens(713, 20), *_PROMPTS[0][33:]]
    assert ask(client, mixed).num_spliced >= 160 + 117 - 2 * 18


def check_audited(client: Client, num_audited: int) -> None:
    """The target's rows: an audit computes the prompt again without a draft."""
    wait_until(lambda: client.internal_state()["audit"]["num_audited"] >= num_audited)
    client.flush()
    assert client.faults() == ""
    assert client.internal_state()["faults"]["num_faults"] == 0


@pytest.mark.feature("speculative decoding")
def test_an_eagle_draft_is_spliced_with_its_target(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Two branches in each step, and a tree that names rows by pairs of tokens."""
    with TREE.serve(model_dir, tmp_path, config=AUDITED, probe=AT_SHIFT_ZERO) as client:
        assert "draft model, mha pool, 4 layers" in client.log()
        compare(client, TREE.num_right)
        check_audited(client, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.feature("NGRAM" if name == "ngram" else "speculative decoding"))
        for name in DRAFTS
    ],
)
def test_every_draft_is_spliced_with_its_target(name: str, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with DRAFTS[name].serve(model_dir, tmp_path, config=AUDITED, probe=AT_SHIFT_ZERO) as client:
        # N-grams are learnt from the answers before.
        compare(client, None if name == "ngram" else DRAFTS[name].num_right)
        check_audited(client, 3)
