"""Speculative decoding with splices: answers are those of the model alone, and the draft guesses as much as before.

The tiny drafts guess some tokens, and how many depends on every row of their KV.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_pic.adapter.sglang.contract import BUILT_FOR, installed_version
from tests.e2e.servers import AT_SHIFT_ZERO, AUDITED
from tests.e2e.serving import (
    _NUM_TOKENS,
    IMAGE,
    A,
    B,
    Client,
    Served,
    ask,
    greedy,
    leave_for_the_host,
    random_tokens,
    serve,
    wait_until,
    words,
)

pytestmark = pytest.mark.e2e
as_built_for = pytest.mark.skipif(
    installed_version() != BUILT_FOR, reason="other versions may refuse servers with a draft"
)

# Below and above the prefill chunk, and one that ends in it.
_PROMPTS = [random_tokens(700 + number, length) for number, length in enumerate((150, 385, 600))]

_ARGS = ("--dtype", "float32", "--chunked-prefill-size", "192")
_CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
_TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")


class Draft(NamedTuple):
    """A model and what guesses its tokens."""

    model: str
    draft: str | None
    args: tuple[str, ...]
    num_right: int = 6
    """How many guesses for the tests' prompts are right at least."""
    page_size: int = 16
    """At most."""

    def serve(self, model_dir: Callable[[str], Path], log_dir: Path, **options: Any) -> AbstractContextManager[Client]:
        """A server of the model with the draft; `options` are those of `serving.serve`."""
        path = ("--speculative-draft-model-path", str(model_dir(self.draft))) if self.draft else ()
        flags = (*_ARGS, "--speculative-algorithm", *self.args, *path)
        return serve(model_dir(self.model), log_dir, *flags, **options)


TREE = Draft("tiny-gqa", "tiny-gqa-eagle", ("EAGLE", *_TREE))
"""Two branches in each step."""
DSA = Draft("tiny-dsa-mtp", None, ("NEXTN", *_CHAIN), page_size=64)
DRAFTS = {
    "standalone": Draft("tiny-gqa", "tiny-gqa", ("STANDALONE", *_CHAIN, "--page-size", "16")),
    "eagle": TREE,
    "eagle-tp2": Draft("tiny-gqa", "tiny-gqa-eagle", ("EAGLE", *_CHAIN, "--page-size", "16", "--tp-size", "2")),
    "nextn": Draft("tiny-mtp", None, ("NEXTN", *_CHAIN)),
    # Target and draft choose tokens; steps of the draft those of the pass before them, or by keys of their own.
    "dsa": DSA,
    "dsa-alone": DSA._replace(
        args=(*DSA.args, "--json-model-override-args", '{"index_share_for_mtp_iteration": false}')
    ),
    # A head for each step, with window layers alone, whose rows are in a pool of their own.
    "mimo": Draft("tiny-mimo", None, ("EAGLE", *_CHAIN, "--page-size", "16")),
    # The heads of a random model guess nothing.
    "eagle3": Draft("tiny-gqa", "tiny-gqa-eagle3", ("EAGLE3", *_CHAIN, "--page-size", "16"), num_right=0),
    "qwen-vl": Draft("tiny-qwen2.5-vl", "tiny-qwen2.5-vl-eagle3", ("EAGLE3", *_CHAIN, "--page-size", "16")),
    "ngram": Draft("tiny-mla", None, ("NGRAM", "--speculative-num-draft-tokens", "8")),
}

_WITH_INDEXER = dict.fromkeys(("dsa", "dsa-alone"), "a draft model with a sparse-attention indexer")
_WITH_MEDIA = "a draft model for one that takes media"
_FEATURES = {"mimo": "multi-layer EAGLE", "ngram": "NGRAM", "qwen-vl": _WITH_MEDIA, **_WITH_INDEXER}


def compare(client: Client, draft: Draft, *, expected: list[list[int]] | None = None, learns: bool = False) -> None:
    """Prompts computed, then spliced from their own chunks in their own context, alone and side by side.

    Answers are the `expected` ones; a draft that `learns` from them guesses more when they are asked for again.
    """
    whole = [ask(client, prompt) for prompt in _PROMPTS]
    assert expected is None or [full.ids for full in whole] == expected
    num_right = 0
    for prompt, full in zip(_PROMPTS, whole, strict=True):
        assert full.num_spliced == 0
        spliced = ask(client, prompt)
        # All but the sink, a partial page at its end and one at the prompt's.
        assert spliced.num_spliced >= len(prompt) - 32 - 2 * draft.page_size
        assert spliced.ids == ask(client, prompt, mode="off").ids == full.ids
        assert learns or spliced._replace(num_spliced=0) == full, "the same guesses are right"
        num_right += spliced.num_right
    assert num_right >= draft.num_right
    together = client.generate_all([*_PROMPTS, random_tokens(711, 300)], max_new_tokens=_NUM_TOKENS)
    assert [answer.ids for answer in together[:3]] == [full.ids for full in whole]
    assert all(answer.chunk_hit_tokens for answer in together[:3])
    # From other donors at other places: what was counted happened, and the rows are there for the next turn.
    mixed = [*random_tokens(712, 50), *_PROMPTS[2][40:200], *random_tokens(713, 20), *_PROMPTS[0][33:]]
    assert ask(client, mixed).num_spliced >= 160 + 117 - 2 * (2 + draft.page_size)


def check_audited(client: Client, num_audited: int) -> None:
    """The target's rows: an audit computes the prompt again without a draft."""
    wait_until(lambda: client.internal_state()["audit"]["num_audited"] >= num_audited)
    client.flush()
    assert client.faults() == ""
    assert client.internal_state()["faults"]["num_faults"] == 0


@as_built_for
@pytest.mark.slow
@pytest.mark.feature("speculative decoding")
def test_an_eagle_draft_is_spliced_with_its_target(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Two branches in each step, and a tree that names rows by pairs of tokens."""
    with TREE.serve(model_dir, tmp_path, config=AUDITED, probe=AT_SHIFT_ZERO) as client:
        assert "draft model, mha pool, 4 layers" in client.log()
        compare(client, TREE)
        check_audited(client, 3)


@pytest.fixture(scope="module")
def answers_of(
    model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[list[int]]]:
    """The greedy answers of a model on a server without a draft, by its name."""

    @cache
    def get(model: str) -> list[list[int]]:
        with serve(model_dir(model), tmp_path_factory.mktemp("plain"), *_ARGS, backend=None) as plain:
            return [answer.ids for answer in plain.generate_all(_PROMPTS, max_new_tokens=_NUM_TOKENS)]

    return get


@pytest.mark.slow
@as_built_for
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.feature(_FEATURES.get(name, "speculative decoding"))) for name in DRAFTS],
)
def test_every_draft_is_spliced_with_its_target(
    name: str, answers_of: Callable[[str], list[list[int]]], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    draft = DRAFTS[name]
    expected = answers_of(draft.model)
    with draft.serve(model_dir, tmp_path, config=AUDITED, probe=AT_SHIFT_ZERO) as client:
        compare(client, draft, expected=expected, learns=name == "ngram")
        check_audited(client, 3)


def served(client: Client, prompt: Sequence[int], *, on_host: bool) -> Served:
    """A prompt behind its donor, whose rows are still there or have left the device."""
    client.flush()
    client.generate(_PROMPTS[2], max_new_tokens=1)
    if on_host:
        pool = json.loads(client.server.get("/server_info"))["max_total_tokens"]
        for number in range(-(-pool // 600) + 1):
            client.generate(random_tokens(730 + number, 600), max_new_tokens=1)
    return ask(client, prompt)


_AROUND_IMAGES = ((192, 122, 60), (150, 90, 61), (50, 30, 200))
"""Tokens around the images of prompts."""
_MOVED = [*random_tokens(721, 150), *_PROMPTS[2], *random_tokens(722, 100)]


@pytest.mark.slow
@as_built_for
@pytest.mark.feature("HiCache with speculative decoding")
@pytest.mark.parametrize("name", sorted(DRAFTS))
def test_a_drafts_rows_are_fetched_from_the_host_with_its_targets(
    name: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """At shift 0 the draft guesses as with computed rows, and moved as with rows that never left the device."""
    draft = DRAFTS[name]
    host = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "4096")
    beside = draft._replace(args=(*draft.args, *host))
    with beside.serve(model_dir, tmp_path, config=AUDITED, probe=AT_SHIFT_ZERO) as client:
        for prompt in (_PROMPTS[2], _MOVED):
            computed = ask(client, prompt, mode="off")
            here, there = (served(client, prompt, on_host=on_host) for on_host in (False, True))
            assert here.num_fetched == 0 < there.num_fetched == there.num_spliced > 450
            assert there._replace(num_fetched=0) == here
            if prompt is not _MOVED and name != "ngram":
                assert here._replace(num_spliced=0) == computed
        # The flushes above drop the other audits.
        check_audited(client, 1)


@pytest.mark.slow
@as_built_for
@pytest.mark.feature(_WITH_MEDIA, "images in prompts", "HiCache with images", "HiCache with speculative decoding")
def test_images_are_spliced_beside_a_draft(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """As stock SGLang serves them: the same answers, and the same guesses are right; from the host, too."""
    draft = DRAFTS["qwen-vl"]
    with draft.serve(model_dir, tmp_path, backend=None) as stock:
        # Chunks end before, in and behind images.
        texts = [IMAGE.join(words(stock, 740 + count, count) for count in counts) for counts in _AROUND_IMAGES]
        computed = [ask(stock, text, images=[A, B]) for text in texts]
    assert sum(each.num_right for each in computed) >= draft.num_right
    host = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "4096")
    beside = draft._replace(args=(*draft.args, *host))
    with beside.serve(model_dir, tmp_path, config=AUDITED, probe=AT_SHIFT_ZERO) as client:
        for text, expected in zip(texts, computed, strict=True):
            client.flush()
            assert ask(client, text, images=[A, B]) == expected
            here = ask(client, text, images=[A, B])
            leave_for_the_host(client)
            there = ask(client, text, images=[A, B])
            assert here.num_fetched == 0 < there.num_fetched == there.num_spliced > 300
            assert here._replace(num_spliced=0) == there._replace(num_spliced=0, num_fetched=0) == expected
        client.flush()
        assert client.faults() == ""


@pytest.mark.slow
@as_built_for
@pytest.mark.feature(_WITH_MEDIA)
def test_an_image_that_is_computed_shares_a_batch_with_splices(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """The draft gets the embeddings of both. A run may begin with an image, which the draft's row before it misses."""
    draft = DRAFTS["qwen-vl"]
    draft = draft._replace(args=(*draft.args, "--chunked-prefill-size", "512"))
    with draft.serve(model_dir, tmp_path, config=AUDITED, probe=AT_SHIFT_ZERO) as client, ThreadPoolExecutor(4) as pool:
        text, behind = words(client, 751, 150), words(client, 752, 90)
        with_image = {"mode": "off", "images": [A]}
        alone = [ask(client, text), ask(client, IMAGE + behind, **with_image)]
        ask(client, IMAGE.join((words(client, 755, 50), behind)), images=[A])
        # The others arrive while the chunks of this one are computed, and are admitted together behind the last.
        ahead = pool.submit(ask, client, random_tokens(754, 10 * 512))
        wait_until(lambda: "#new-token: 512" in client.log())
        moved = IMAGE.join((words(client, 753, 50), behind))
        others = [pool.submit(ask, client, text), pool.submit(ask, client, IMAGE + behind, **with_image)]
        image_first = pool.submit(ask, client, moved, images=[A]).result()
        spliced, computed = (each.result() for each in others)
        assert ahead.result().num_spliced == 0
        assert "#new-seq: 3" in client.log()
        assert spliced.num_spliced > 100
        assert image_first.num_spliced > 70 + 80
        assert [spliced._replace(num_spliced=0), computed] == alone
        client.flush()
        assert client.faults() == ""


@pytest.mark.slow
@as_built_for
@pytest.mark.feature(_WITH_MEDIA)
def test_a_prompt_that_spliced_tokens_cut_is_finished_beside_one_that_is_computed(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """A batch has two chunks of tokens at most beside such a draft. Here the first one spends little of its budget."""
    draft, prompts = DRAFTS["qwen-vl"], [random_tokens(761, 1500), random_tokens(762, 900)]
    with draft.serve(model_dir, tmp_path, config=AUDITED, probe=AT_SHIFT_ZERO) as client:
        alone = [ask(client, prompt).ids for prompt in prompts]
        # One call, so that they are considered in this order, whether or not in one round.
        sampling = [greedy(_NUM_TOKENS), greedy(_NUM_TOKENS, pic={"mode": "off"})]
        cut, computed = client.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
        assert [cut["output_ids"], computed["output_ids"]] == alone
        assert cut["meta_info"]["cached_tokens_details"]["pic"] > 1300
        client.flush()
        assert client.faults() == ""


@pytest.mark.slow
def test_sampled_and_structured_answers_beside_a_draft_end_as_asked(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    sampled: dict[str, Any] = greedy(12) | {"temperature": 1.5, "top_k": 50, "top_p": 0.9}
    structured = {"max_new_tokens": 12, "temperature": 0, "regex": "(ab|cd){3}"}
    with TREE.serve(model_dir, tmp_path, backend=None) as client:
        bodies = [{"input_ids": prompt, "sampling_params": sampled} for prompt in _PROMPTS]
        assert {client.post("/generate", body)["meta_info"]["completion_tokens"] for body in bodies} == {12}
        text = client.post("/generate", {"input_ids": _PROMPTS[0], "sampling_params": structured})["text"]
        assert re.fullmatch("(ab|cd){3}", text)
        client.flush()
        assert client.faults() == ""
