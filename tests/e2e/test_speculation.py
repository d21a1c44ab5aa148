"""Speculative decoding of stock SGLang on the CPU platform: greedy answers are those of the model alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_pic.platform import torchvision_shim
from tests.e2e.serving import Client, greedy, random_tokens, serve

pytestmark = pytest.mark.e2e

# The longer half is prefilled in chunks.
_PROMPTS = [random_tokens(i, 20 + 60 * i) for i in range(6)]
_NUM_TOKENS = 24
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

    @contextmanager
    def serve(self, model_dir: Callable[[str], Path], log_dir: Path, **options: Any) -> Iterator[Client]:
        """A server of the model with the draft; `options` are those of `serving.serve`."""
        path = ("--speculative-draft-model-path", str(model_dir(self.draft))) if self.draft else ()
        flags = (*_ARGS, "--speculative-algorithm", *self.args, *path)
        with serve(model_dir(self.model), log_dir, *flags, **options) as client:
            yield client


TREE = Draft("tiny-gqa", "tiny-gqa-eagle", ("EAGLE", *_TREE))
"""Two branches in each step."""
DRAFTS = {
    "standalone": Draft("tiny-gqa", "tiny-gqa", ("STANDALONE", *_CHAIN, "--page-size", "16")),
    "eagle-tp2": Draft("tiny-gqa", "tiny-gqa-eagle", ("EAGLE", *_CHAIN, "--page-size", "16", "--tp-size", "2")),
    "nextn": Draft("tiny-mtp", None, ("NEXTN", *_CHAIN)),
    # The heads of a random model guess nothing.
    "eagle3": Draft("tiny-gqa", "tiny-gqa-eagle3", ("EAGLE3", *_CHAIN, "--page-size", "16"), num_right=0),
    "ngram": Draft("tiny-mla", None, ("NGRAM", "--speculative-num-draft-tokens", "8")),
}


def computed(model: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that transformers answers in float32."""
    torchvision_shim.install()
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        tokens = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=_NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(tokens[0, len(prompt) :].tolist())
    return answers


def drafts_of(client: Client, prompt: Sequence[int]) -> int:
    """Right guesses of the draft while the server answers a prompt."""
    body = {"input_ids": list(prompt), "sampling_params": greedy(_NUM_TOKENS)}
    meta = client.post("/generate", body)["meta_info"]
    assert meta["completion_tokens"] == _NUM_TOKENS
    return int(meta["spec_num_correct_drafts"])


@pytest.mark.slow
def test_trees_of_an_eagle_draft_change_no_answer(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Two branches in each step, chunked prompts, batches, prefix hits; sampled and structured answers end as asked."""
    expected = computed(model_dir(TREE.model), _PROMPTS)
    with TREE.serve(model_dir, tmp_path, backend=None) as client:
        for _ in range(2):
            answers = client.generate_all(_PROMPTS, max_new_tokens=_NUM_TOKENS)
            assert [answer.ids for answer in answers] == expected
        # A prompt's last token is computed, and the tree keys pairs of tokens: one less is found again.
        assert [answer.cached_tokens for answer in answers] == [len(prompt) - 2 for prompt in _PROMPTS]
        assert sum(drafts_of(client, prompt) for prompt in _PROMPTS) > 6
        client.flush()
        sampling: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "top_k": 50, "top_p": 0.9}
        sampling |= {"ignore_eos": True}
        bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in _PROMPTS[:3]]
        assert {client.post("/generate", body)["meta_info"]["completion_tokens"] for body in bodies} == {12}
        sampling = {"max_new_tokens": 12, "temperature": 0, "regex": "(ab|cd){3}"}
        text = client.post("/generate", {"input_ids": _PROMPTS[0], "sampling_params": sampling})["text"]
        assert re.fullmatch("(ab|cd){3}", text)
        client.flush()
        assert client.faults() == ""


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
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_no_algorithm_changes_an_answer(
    draft: Draft,
    answers_of: Callable[[str], list[list[int]]],
    model_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """A server with a draft beside one without: in a batch, again from the cache, and alone."""
    expected = answers_of(draft.model)
    with draft.serve(model_dir, tmp_path, backend=None) as client:
        for _ in range(2):
            answers = client.generate_all(_PROMPTS, max_new_tokens=_NUM_TOKENS)
            assert [answer.ids for answer in answers] == expected
        assert sum(drafts_of(client, prompt) for prompt in _PROMPTS) >= draft.num_right
        client.flush()
        assert client.faults() == ""
