"""Speculative decoding with splices: answers are those of the model alone, and the draft guesses as much as before.

The tiny drafts guess some tokens, and how many depends on every row of their KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_pic.adapter.contract import BUILT_FOR, installed_version
from tests.e2e.serving import Client, random_tokens, serve, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(installed_version() != BUILT_FOR, reason="other versions may refuse servers with a draft"),
]

_NUM_TOKENS = 32
# Below and above the prefill chunk, and one that ends in it.
_PROMPTS = [random_tokens(700 + number, length) for number, length in enumerate((150, 385, 600))]
_ARGS = ("--dtype", "float32", "--chunked-prefill-size", "192")
_CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
_TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")
_CONFIG = {"cost_gate": "off", "audit_rate": 1.0}
# A prompt that is repeated is spliced from its own chunks at shift 0.
_PROBE = {"ignore_prefix": True, "check_invariants": True}


class Served(NamedTuple):
    """An answer, and how the draft did."""

    ids: list[int]
    num_spliced: int
    num_right: int
    """Tokens of the draft that were accepted."""
    num_rounds: int


def ask(client: Client, prompt: Sequence[int], *, mode: str = "auto") -> Served:
    sampling = {"temperature": 0, "max_new_tokens": _NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": {**sampling, "custom_params": {"pic": {"mode": mode}}}}
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
    draft = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(model_dir("tiny-gqa-eagle")))
    with serve(model_dir("tiny-gqa"), tmp_path, *_ARGS, *draft, *_TREE, config=_CONFIG, probe=_PROBE) as client:
        assert "draft model, mha pool, 4 layers" in client.log()
        compare(client, 6)
        check_audited(client, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "draft", "args", "num_right"),
    [
        pytest.param(
            *("tiny-gqa", "tiny-gqa", ("STANDALONE", *_CHAIN, "--page-size", "16"), 6),
            marks=pytest.mark.feature("speculative decoding"),
            id="standalone",
        ),
        pytest.param(
            *("tiny-gqa", "tiny-gqa-eagle", ("EAGLE", *_CHAIN, "--page-size", "16", "--tp-size", "2"), 6),
            marks=pytest.mark.feature("speculative decoding"),
            id="eagle-tp2",
        ),
        pytest.param(
            *("tiny-mtp", None, ("NEXTN", *_CHAIN), 6), marks=pytest.mark.feature("speculative decoding"), id="nextn"
        ),
        # The head of a random model guesses nothing.
        pytest.param(
            *("tiny-gqa", "tiny-gqa-eagle3", ("EAGLE3", *_CHAIN, "--page-size", "16"), 0),
            marks=pytest.mark.feature("speculative decoding"),
            id="eagle3",
        ),
        pytest.param(
            *("tiny-mla", None, ("NGRAM", "--speculative-num-draft-tokens", "8"), None),
            marks=pytest.mark.feature("NGRAM"),
            id="ngram",
        ),
    ],
)
def test_every_draft_is_spliced_with_its_target(
    model: str,
    draft: str | None,
    args: tuple[str, ...],
    num_right: int | None,
    model_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    path = ("--speculative-draft-model-path", str(model_dir(draft))) if draft else ()
    flags = ("--speculative-algorithm", *args, *path)
    with serve(model_dir(model), tmp_path, *_ARGS, *flags, config=_CONFIG, probe=_PROBE) as client:
        compare(client, num_right)
        check_audited(client, 3)
