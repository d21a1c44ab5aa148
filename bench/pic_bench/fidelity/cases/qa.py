"""Questions over documents that were computed in another order, for `tasks`."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import partial

from pic_generate.questions import Question

from pic_bench.fidelity.cases.case import Case, Frame, FrameWords, place_blocks, words
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.metrics import normalise, score_answer

# As much as a model of 135 M parameters can use.
MAX_DOCUMENTS = 6
MAX_RETRIEVAL_DOCUMENTS = 3
MAX_DOCUMENT_TOKENS = 200
MIN_BLOCK_TOKENS = 80
GOLD_TOKENS = 32
ANSWER_TOKENS = 32
MIN_F1 = 0.5

_WORDS = words("questions", FrameWords)
_SENTENCE = re.compile(r"[^\n.!?]+")


class QaFrames:
    """The pieces around documents, as one model's ids."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self.markers = [text.ids(f"\n\nDocument {name}") for name in _WORDS.markers]
        other = _WORDS.donor_header
        before, closing = text.around(other, "New in the archive today:", " ... That is all for today.")
        markers = [text.ids(f" ...\n\nSheet {name}") for name in _WORDS.donor_markers]
        self.donor = Frame(header=before, markers=markers, closing=closing)
        self.foreign = text.ids(f"\n{other}")

    def target(self, question: Question) -> Frame:
        """The prompt's frame: its closing asks the question and begins the answer."""
        return self.frame(_WORDS.header, f"Question: {question.question}", question.lead)

    def frame(self, header: str, asks: str, lead: str) -> Frame:
        """A prompt's frame: what the system message says, what is asked behind the documents, how the answer begins."""
        before, closing = self._text.around(header, "Here are the documents.", f"\n\n{asks}")
        return Frame(header=before, markers=self.markers, closing=closing + self._text.ids(lead))


def qa_case(frames: QaFrames, text: ModelText, question: Question, *, seed: int, length: int = 1) -> Case:
    """The prompt of one question: all documents with the answer, and others; short ones are joined, long ones are cut.

    `length` times as many documents are taken. A cut document is the part around a gold answer, or around the sentence
    nearest to question and answer where the answer is in other words.
    """
    rng = random.Random(f"qa-{seed}-{question.name}")
    blocks = _blocks(text, question, rng, length)
    prompt, donor = place_blocks(frames.target(question), frames.donor, blocks, frames.foreign, rng)
    answer = _answer_ids(text, question)
    return Case(
        name=f"qa-{question.source}-{question.name}",
        source=question.source,
        prompt=prompt,
        gold=answer[:GOLD_TOKENS],
        donor=donor,
        judge=partial(answers_question, question),
        # An answer that is all there still fits behind a few words.
        answer_tokens=max(ANSWER_TOKENS, len(answer) + ANSWER_TOKENS // 2),
    )


def answers_question(question: Question, answer: str, _full: str) -> bool:
    """Whether a gold answer stands in an answer's first line, or, but for retrieval, their F1 is high enough."""
    contains = score_answer(answer, question.answers, contains=True) == 1
    f1 = score_answer(answer, question.answers, contains=False)
    return contains or (f1 >= MIN_F1 and not question.is_retrieval)


def _answer_ids(text: ModelText, question: Question) -> list[int]:
    """The first gold answer, as it would follow the prompt."""
    answer = question.answers[0]
    return text.ids(f" {answer}" if question.lead[-1:].isalnum() else answer)


def _blocks(text: ModelText, question: Question, rng: random.Random, length: int) -> list[list[int]]:
    cut = {i: _cut(text, document, question) for i, document in enumerate(question.documents)}
    holding = sorted(question.supporting) or [
        i for i, document in enumerate(question.documents) if _find(document, question.answers) is not None
    ]
    others = [i for i in cut if i not in holding]
    rng.shuffle(others)
    most = length * (MAX_RETRIEVAL_DOCUMENTS if question.is_retrieval else MAX_DOCUMENTS)
    kept = sorted([*holding, *others][: min(most, len(_WORDS.markers))])
    rng.shuffle(kept)
    blocks: list[list[int]] = []
    for i in kept:
        if blocks and len(blocks[-1]) < MIN_BLOCK_TOKENS:
            blocks[-1] = blocks[-1] + cut[i]
        else:
            blocks.append(cut[i])
    if len(blocks) > 1 and len(blocks[-1]) < MIN_BLOCK_TOKENS:
        last = blocks.pop()
        blocks[-1] = blocks[-1] + last
    return blocks


def _cut(text: ModelText, document: str, question: Question) -> list[int]:
    ids = text.document(f"\n{document}")
    if len(ids.ids) <= MAX_DOCUMENT_TOKENS:
        return ids.ids
    return ids.window(_middle(document, question), MAX_DOCUMENT_TOKENS)


def _middle(document: str, question: Question) -> int:
    """Where the answer stands, or else the sentence that shares most with question and answers, rare words first."""
    if (found := _find(document, question.answers)) is not None:
        return found
    wanted = set(normalise(" ".join([question.question, *question.answers])).split())
    often = Counter(normalise(document).split())
    best, middle = 0.0, 0
    for sentence in _SENTENCE.finditer(document):
        shared = sum(1 / often[word] for word in wanted & set(normalise(sentence[0]).split()))
        if shared > best:
            best, middle = shared, (sentence.start() + sentence.end()) // 2
    return middle


def _find(document: str, answers: tuple[str, ...]) -> int | None:
    lower = document.lower()
    return next((at for answer in answers if (at := lower.find(answer.lower())) >= 0), None)
