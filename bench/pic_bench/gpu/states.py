"""What a splice would cost a model with recurrent state, by how the state is moved. No server does it.

A gated delta rule takes the state S before a text to S A + B behind it. The donor has S_a before the text and S_b
behind it, the prompt has S_now before it: S' = S_b + (S_now - S_a) A, with the donor's A. Donor and prompt differ in a
clock of as many tokens, so that rows of attention are copied without a rotation. It needs transformers, no SGLang.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from pic_platform import torchvision_shim
from pic_traces import load
from pic_traces.encode.tokenizer import load_tokenizer
from torch import Tensor, nn

from pic_bench.gpu.record import Found, Work

_RULE: Final = "torch_chunk_gated_delta_rule"
_LENGTHS: Final = (256, 1024, 4096)
"""Tokens of the text that is moved."""
_CLOCKS: Final = ("09:41", "10:05", "13:58", "16:20", "21:07", "23:36")
_ENDING: Final = "\nThe clock above shows"


class Move(Enum):
    """How the state behind the moved text is made."""

    EXACT = "exact"
    """Computed: what is left is the error of the copied rows."""
    MATRIX = "matrix"
    GATES = "gates"
    """A is taken for the product of its gates, one number a head."""
    COPY = "copy"
    """A is taken for zero: the donor's state."""


class Case(NamedTuple):
    """Token ids: two beginnings of one length, and the text and the ending that follow both."""

    donor: list[int]
    prompt: list[int]
    text: list[int]
    ending: list[int]


class Rule:
    """The delta rule of a model's layers, and the arguments that each layer gave it in the last pass.

    Args:
        model: of a family whose module has transformers' `torch_chunk_gated_delta_rule`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {type(part).__module__ for part in model.modules()}
        self._homes = [sys.modules[name] for name in sorted(modules) if hasattr(sys.modules[name], _RULE)]
        self.calls: list[dict[str, Any]] = []

    @property
    def is_there(self) -> bool:
        """Whether the model has such layers."""
        return bool(self._homes)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the calls of one pass, in the order of layers."""
        rule = getattr(self._homes[0], _RULE)
        self.calls = []

        def record(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
            self.calls.append({"query": query, "key": key, "value": value, **kwargs})
            return rule(query, key, value, **kwargs)

        for home in self._homes:
            setattr(home, _RULE, record)
        try:
            yield
        finally:
            for home in self._homes:
                setattr(home, _RULE, rule)

    def apply(self, call: dict[str, Any], states: Tensor) -> Tensor:
        """Take states through A of a recorded pass: the rule without new values, so that B is zero.

        Args:
            call: of one layer.
            states: `[1, num_heads, k_dim, v_dim]`.
        """
        empty = call["value"].new_zeros((*call["value"].shape[:-1], states.shape[-1]))
        return getattr(self._homes[0], _RULE)(**{**call, "value": empty, "initial_state": states})[1]  # type: ignore[no-any-return]


def run(work: Work) -> Found:
    """Mean KL of the next token against a full prefill for each `Move`, and the norm of A, by length."""
    if work.model is None and not work.is_dry:
        return Found(notes=["needs --model FOLDER with trained weights of Qwen3-Next or Qwen3.5"])
    torchvision_shim.install()
    model, cases = (_tiny(), _random_cases()) if work.model is None else _trained(Path(work.model), work.device)
    rule = Rule(model)
    if not rule.is_there:
        return Found(notes=[f"{work.model}: has no gated delta rule"])
    found: dict[str, list[dict[str, float]]] = {}
    for case in cases:
        with torch.inference_mode():
            found.setdefault(str(len(case.text)), []).append(measure(model, rule, case))
    measured = [one for ones in found.values() for one in ones]
    if not measured:
        return Found(failures=["no two clocks have as many tokens"])
    figures = {f"state_{name}": sum(one[name] for one in measured) / len(measured) for name in measured[0]}
    return Found(figures=figures, raw={"by_length": found})


def measure(model: Any, rule: Rule, case: Case) -> dict[str, float]:
    """One donor and one prompt.

    Returns:
        `kl_*` for each `Move`: nats of the next token against a full prefill; `same_*`: 1.0 where the first choice is
        the full prefill's; `norm`: the median over layers and heads of A's largest singular value.
    """
    donor, _ = _advance(model, None, case.donor)
    before, _ = _advance(model, None, case.prompt)
    with rule.recorded():
        donor_after, _ = _advance(model, donor, case.text)
    calls = rule.calls
    full, _ = _advance(model, before, case.text)
    truth = _advance(model, full, case.ending)[1]
    found: dict[str, float] = {}
    for move in Move:
        cache = copy.deepcopy(full)
        for layer, source in zip(_attention(cache), _attention(donor_after), strict=True):
            at = len(case.prompt)
            layer.keys = torch.cat((layer.keys[..., :at, :], source.keys[..., at:, :]), dim=-2)
            layer.values = torch.cat((layer.values[..., :at, :], source.values[..., at:, :]), dim=-2)
        if move is not Move.EXACT:
            for target, *states, call in zip(*map(_recurrent, (cache, donor, before, donor_after)), calls, strict=True):
                first, now, last = (each.recurrent_states[0] for each in states)
                target.recurrent_states[0] = last + _moved(rule, move, call, now - first)
                target.conv_states[0] = states[-1].conv_states[0].clone()
        logits = _advance(model, cache, case.ending)[1]
        found[f"kl_{move.value}"] = float((truth.exp() * (truth - logits)).sum())
        found[f"same_{move.value}"] = float(truth.argmax() == logits.argmax())
    found["norm"] = float(torch.cat([norms(rule, call) for call in calls]).median())
    return found


def norms(rule: Rule, call: dict[str, Any]) -> Tensor:
    """The largest singular value of A in each head, `[num_heads]`."""
    heads, width = call["value"].shape[2], call["key"].shape[-1]
    unit = torch.eye(width, device=call["key"].device).expand(1, heads, width, width)
    return torch.linalg.matrix_norm(rule.apply(call, unit)[0].float(), ord=2)


def _moved(rule: Rule, move: Move, call: dict[str, Any], difference: Tensor) -> Tensor:
    if move is Move.MATRIX:
        return rule.apply(call, difference)
    return difference * call["g"].float().sum(1).exp()[..., None, None] if move is Move.GATES else 0 * difference


def _advance(model: Any, cache: Any, ids: list[int]) -> tuple[Any, Tensor]:
    """Compute tokens behind a cache, which stays as it is: the new cache, and log probabilities `[vocabulary]`."""
    out = model(torch.tensor([ids], device=model.device), past_key_values=copy.deepcopy(cache), logits_to_keep=1)
    return out.past_key_values, out.logits[0, -1].float().log_softmax(-1)


def _recurrent(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]


def _attention(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if not hasattr(layer, "recurrent_states")]


def _trained(folder: Path, device: str) -> tuple[Any, Iterator[Case]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    return model, _clock_cases(folder)


def _clock_cases(folder: Path) -> Iterator[Case]:
    """A clock, then a recorded session, then the question for the clock."""
    tokenizer = load_tokenizer(folder)
    said = "\n".join(str(message.get("content")) for session in load("sample:opendevin") for message in session.pool)
    text = tokenizer.encode(said, add_special_tokens=False).ids
    heads = [tokenizer.encode(f"The clock shows {clock}.\n", add_special_tokens=False).ids for clock in _CLOCKS]
    ending = tokenizer.encode(_ENDING, add_special_tokens=False).ids
    for length in _LENGTHS:
        for donor, prompt in zip(heads, heads[1:] + heads[:1], strict=True):
            if len(donor) == len(prompt):
                yield Case(donor, prompt, text[:length], ending)


def _tiny(vocab_size: int = 64) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    sizes |= {"linear_num_value_heads": 2, "num_experts": 0, "intermediate_size": 32, "initializer_range": 0.3}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=vocab_size, num_hidden_layers=4, **sizes)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            # So that states outlast the text.
            nn.init.constant_(weight, -4.0)
    return model


def _random_cases() -> Iterator[Case]:
    draw = torch.Generator().manual_seed(1)
    for length in (8, 32):
        for _ in range(4):
            ids = torch.randint(64, (length + 24,), generator=draw).tolist()
            # The convolution reads back three tokens: these are the same in both.
            yield Case([*ids[:5], *ids[10:13]], [*ids[5:10], *ids[10:13]], ids[16:-8], ids[-8:])
