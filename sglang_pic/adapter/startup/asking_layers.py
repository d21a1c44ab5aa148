"""Finds the layers whose attention finds the document that a question asks for (`core.reordered: attend`).

The live model computes a few prompts with a list of notes and a question about one of them. A layer finds a note if of
all notes the asked one has the token that the question attends to most.
"""

from __future__ import annotations

import logging
import random
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.probe.borrowed_slots import borrow_slots
from sglang_pic.adapter.probe.extend import PADDING_ROW, trial_batch, trial_forward
from sglang_pic.adapter.probe.gathered import gathers
from sglang_pic.adapter.serve.gap_batch import Asking
from sglang_pic.adapter.serve.prefill_path import prefill_path
from sglang_pic.adapter.serve.second_pass import SecondPass
from sglang_pic.adapter.serve.stations import Stations
from sglang_pic.adapter.sglang.seams import BuildContext, ModelRunner
from sglang_pic.adapter.startup.live_model import LiveModel
from sglang_pic.adapter.startup.tokenizer import Tokenizer
from sglang_pic.adapter.support import disaggregation_mode
from sglang_pic.errors import Refused, UnsupportedError
from sglang_pic.runtime.views import PoolKind, PoolView

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

logger = logging.getLogger(__name__)

NUM_LAYERS: Final = 3
LEAST_FOUND: Final = 0.75
"""Share of the prompts in which a layer must find the note."""
_NUM_PROMPTS, _NUM_NOTES = 16, 8
_NAMES: Final = ("Heron", "Maple", "Quarry", "Anchor", "Lantern", "Falcon", "Juniper", "Copper", "Saddle", "Beacon")
_VALUES: Final = {
    "city": ("Oslo", "Lisbon", "Nairobi", "Quito", "Hanoi", "Tunis", "Lima", "Dublin", "Perth", "Riga"),
    "colour": ("red", "blue", "green", "grey", "white", "black", "brown", "orange", "violet", "yellow"),
    "owner": ("Lena", "Omar", "Mara", "Felix", "Iris", "Boris", "Nora", "Hugo", "Tessa", "Ivan"),
}


def find_layers(live: LiveModel, second: SecondPass) -> None:
    """Give a server's second pass its layers; all ranks must call this together.

    Raises:
        UnsupportedError: too few layers find the notes.
    """
    assert live.tokenizer is not None
    with torch.no_grad():
        found, margin = _try_all(live.runner, live.splicer.view, live.tokenizer, second)
    best = sorted(range(len(found)), key=lambda at: (-found[at], -margin[at]))[:NUM_LAYERS]
    shares = [found[at] / _NUM_PROMPTS for at in best]
    second.layers = sorted(second.layers[at] for at in best)
    logger.info("sglang_pic: layers %s find %s of the notes asked for", second.layers, shares)
    if len(best) < NUM_LAYERS or shares[-1] < LEAST_FOUND:
        line = f"the best layers find {min(shares):.0%} of the notes that questions ask for"
        raise _refused(line, f"they must find {LEAST_FOUND:.0%}")


def make_second_pass(ctx: BuildContext, live: LiveModel, stations: Stations, series: Series) -> SecondPass:
    """The second pass of a server with `attend`, with all layers.

    Raises:
        UnsupportedError: this model or server cannot have it.
    """
    view, attention = live.splicer.view, _attention(live.runner)
    for line, is_so in {
        "a draft model": bool(live.drafts),
        "latent rows (MLA)": view.kind is PoolKind.MLA,
        "layers with sliding windows": view.windows is not None or any(map(_has_window, attention)),
        f"{view.dtype} rows": view.dtype.itemsize < 2,
        "ranks that gather tokens (DP attention)": gathers(),
        "PD disaggregation": disaggregation_mode(ctx) != "null",
        "no tokenizer": live.tokenizer is None,
    }.items():
        if is_so:
            raise _refused(line, "a second pass needs keys by head of every token, and all ranks in it")
    return SecondPass(view, stations.ranks, sorted({each.layer_id for each in attention}), series)


def _attention(runner: ModelRunner) -> list[RadixAttention]:
    """The layers that attend; some models have others, too."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [each for each in runner.model.modules() if isinstance(each, RadixAttention)]


def _has_window(layer: RadixAttention) -> bool:
    """Whether a layer attends to a window or a chunk; with --disable-hybrid-swa-memory the pool does not show it."""
    return layer.sliding_window_size > -1 or layer.use_irope


def _refused(found: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        Refused(reason, 'set core.reordered to "compute"').line(f"core.reordered=attend with {found}")
    )


class _Prompt(NamedTuple):
    tokens: list[int]
    notes: list[tuple[int, int]]
    asked: int
    last: tuple[int, int]


def _try_all(
    runner: ModelRunner, view: PoolView, tokenizer: Tokenizer, second: SecondPass
) -> tuple[list[int], list[float]]:
    """For each layer, how many notes it finds, and the mean share of the asked note in the scores of all."""
    prompts = [_make_prompt(tokenizer, random.Random(f"notes-{number}")) for number in range(_NUM_PROMPTS)]
    longest = max(len(prompt.tokens) for prompt in prompts)
    row = runner.req_to_token_pool.req_to_token[PADDING_ROW]
    found, shares = torch.zeros(len(second.layers)), torch.zeros(len(second.layers))
    with borrow_slots(view, 1, longest, row) as (slots,):
        for prompt in prompts:
            total = len(prompt.tokens)
            row[:total] = slots[:total].to(row.dtype)
            input_ids = torch.tensor(prompt.tokens, dtype=torch.int64, device=runner.device)
            batch = trial_batch(runner, [total], input_ids=input_ids, slots=slots[:total])
            asking = [Asking(0, 0, total, prompt.notes, [], prompt.last, slots[:total])]
            with prefill_path(runner, replays=False), second.watching(asking):
                trial_forward(runner, batch)
            scores = second.scores()
            found += scores.argmax(1) == prompt.asked
            shares += scores[:, prompt.asked] / scores.sum(1) / _NUM_PROMPTS
    return found.int().tolist(), shares.tolist()


def _make_prompt(tokenizer: Tokenizer, rng: random.Random) -> _Prompt:
    names = rng.sample(_NAMES, _NUM_NOTES)
    values = {key: rng.sample(each, _NUM_NOTES) for key, each in _VALUES.items()}
    notes = [
        f"# Note {at + 1}\nThe house called {name} stands in {values['city'][at]}. Its door was painted "
        f"{values['colour'][at]} last spring. It belongs to {values['owner'][at]}, who lets it in summer.\n\n"
        for at, name in enumerate(names)
    ]
    asked, key = rng.randrange(_NUM_NOTES), rng.choice([*_VALUES])
    question = {
        "city": "In which city does {0} stand?\nAnswer: The house called {0} stands in",
        "colour": "Which colour has the door of {0}?\nAnswer: The door of the house called {0} was painted",
        "owner": "To whom does {0} belong?\nAnswer: The house called {0} belongs to",
    }[key].format(names[asked])
    texts = ["Read the notes about the houses, then answer the question.\n\n", *notes, f"Question: {question}"]
    parts = [[*tokenizer.encode(text, add_special_tokens=at == 0)] for at, text in enumerate(texts)]
    spans = [*pairwise(accumulate(map(len, parts), initial=0))]
    return _Prompt([token for part in parts for token in part], spans[1:-1], asked, spans[-1])
