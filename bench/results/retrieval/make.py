"""Writes the retrieval calls: four of 100 passages, drawn anew by popularity (1 / rank) and shuffled, and a question.

python make.py QA/musique_cacheblend.jsonl.gz retrieval.jsonl
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys

CALLS, DRAWN, WORDS = 200, 4, 150
SYSTEM = "You answer questions. Read the passages, then answer in a few words. If no passage has the answer, say so."


def passages_of(items: list[dict], rng: random.Random) -> tuple[list[str], list[str]]:
    """Whole sentences of about 150 words of one document of each item, and the item's question."""
    passages, questions = [], []
    for item in items:
        for document in rng.sample(item["documents"], len(item["documents"])):
            text = ""
            for sentence in re.split(r"(?<=[.!?]) ", document["text"]):
                if len(text.split()) >= WORDS:
                    break
                text += sentence + " "
            if WORDS * 0.8 <= len(text.split()) <= WORDS * 1.3:
                passages.append(text.strip())
                questions.append(item["qa"][0]["question"])
                break
    return passages[:100], questions[:100]


def main(data: str, out: str) -> None:
    """A call a line, each a session of its own."""
    rng = random.Random("retrieval-0")
    with gzip.open(data, "rt") as lines:
        items = [json.loads(line) for line in lines]
    rng.shuffle(items)
    passages, questions = passages_of(items, rng)
    weights = [1 / (rank + 1) for rank in range(len(passages))]
    with open(out, "w") as file:
        for number in range(CALLS):
            drawn: list[int] = []
            while len(drawn) < DRAWN:
                (one,) = rng.choices(range(len(passages)), weights)
                if one not in drawn:
                    drawn.append(one)
            rng.shuffle(drawn)
            text = "\n\n".join(f"Passage:\n{passages[i]}" for i in drawn)
            user = f"{text}\n\nQuestion: {questions[rng.choice(drawn)]}"
            told = [("system", SYSTEM), ("user", user), ("assistant", "-")]
            messages = [{"role": role, "content": content} for role, content in told]
            file.write(json.dumps({"session_id": f"r{number}", "messages": messages, "turns": [2]}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
