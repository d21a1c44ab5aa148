"""Drafts for speculative decoding beside the tiny models: `tiny-gqa-eagle`, `tiny-gqa-eagle3`, `tiny-mtp`,
`tiny-dsa-mtp`, whose draft has an indexer as its target, `tiny-mimo`, which has a head for each step, and
`tiny-qwen2.5-vl-eagle3`, which takes the embeddings of images.

A draft with random weights never guesses a token. All but one are made of layers of their target, so that some guesses
are right and how many depends on every row of the draft's KV; the target's hidden states enter with a seeded share.
`tiny-gqa-eagle3` is random: its layer reads the tokens through attention alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pic_models import tiny
from pic_models.checkpoint import Config, Progress

if TYPE_CHECKING:
    import torch

_HIDDEN_SHARE = 0.02
"""Standard deviation of the target's hidden state where it is added to a token's embedding; the embedding's is 1."""

_QUIET = 0.3
"""Factor of the outputs of all layers but the first, if MTP layers are copies of the first layer."""

_DRAFT_VERSION = 1
"""Raise when the same recipe makes other weights."""

_TARGET = tiny.RECIPES["tiny-gqa"]

_MTP = tiny.Recipe(
    seed=20_262,
    config=tiny.RECIPES["tiny-mla"].config
    | {"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 0, "num_nextn_predict_layers": 1},
)

_DSA_MTP = tiny.Recipe(
    seed=20_265,
    config=tiny.RECIPES["tiny-dsa"].config
    | {
        "first_k_dense_replace": 0,
        # As in GLM-5.2: the steps of a draft attend to the tokens that its pass over the prompt chose last.
        "index_share_for_mtp_iteration": True,
        "num_nextn_predict_layers": 1,
    },
)

_QWEN_VL = tiny.RECIPES["tiny-qwen2.5-vl"]

_EAGLE3: Config = _TARGET.config | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": _TARGET.config["vocab_size"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}

_NUM_HEADS = 3


def fingerprint() -> str:
    """Identifies the recipes that drafts are made from, and the way they are made."""
    made_from = ":".join(map(tiny.fingerprint, (_TARGET, _MTP, _DSA_MTP, _QWEN_VL, tiny.MIMO)))
    return f"drafts:{made_from}:v{_DRAFT_VERSION}"


def _write_eagle(target: Path, progress: Progress) -> None:
    import torch

    progress("making the EAGLE head")
    hidden = tiny.HIDDEN
    kept = {
        name.removeprefix("model."): weight
        for name, weight in tiny.draw_weights(_TARGET).items()
        # SGLang's EAGLE layers have neither a norm before the first nor one behind the last.
        if name.startswith("model.layers.") and name != "model.layers.0.input_layernorm.weight"
    }
    kept["fc.weight"] = torch.cat([torch.eye(hidden), _share(hidden, hidden)], dim=1)
    kept["fc.bias"] = torch.zeros(hidden)
    tiny.write_folder(target, _TARGET.config | {"architectures": ["LlamaForCausalLMEagle"]}, kept, progress)


def _write_eagle3(target: Path, progress: Progress) -> None:
    import torch

    progress("drawing the EAGLE3 head")
    recipe = tiny.Recipe(seed=20_263, config=_TARGET.config)
    drawn, hidden = tiny.draw_weights(recipe), tiny.HIDDEN
    kept = {
        name.replace("model.layers.0", "midlayer"): weight
        for name, weight in drawn.items()
        if name.startswith("model.layers.0.")
    }
    for part in ("q_proj", "k_proj", "v_proj"):
        # The layer reads the token beside the hidden state.
        name = f"self_attn.{part}.weight"
        kept[f"midlayer.{name}"] = torch.cat([drawn[f"model.layers.0.{name}"], drawn[f"model.layers.1.{name}"]], dim=1)
    kept["midlayer.hidden_norm.weight"] = drawn["model.layers.1.input_layernorm.weight"]
    kept["fc.weight"] = _share(hidden, 3 * hidden) / _HIDDEN_SHARE
    kept["norm.weight"] = drawn["model.norm.weight"]
    kept["lm_head.weight"] = drawn["lm_head.weight"]
    tiny.write_folder(target, _EAGLE3 | {"num_hidden_layers": 1}, kept, progress)


def _write_qwen_vl_eagle3(target: Path, progress: Progress) -> None:
    """All but the last of the target's layers, above one that adds a token's embedding to the hidden state.

    That layer attends to the token itself. With HiCache SGLang serves no draft that has more layers than its target.
    """
    import torch

    progress("making the EAGLE3 head")
    drawn, hidden = tiny.draw_weights(_QWEN_VL), tiny.HIDDEN
    num_heads, kept = int(str(_QWEN_VL.config["num_attention_heads"])), dict[str, torch.Tensor]()
    last = f"model.layers.{int(str(_QWEN_VL.config['num_hidden_layers'])) - 1}."
    for name, given in drawn.items():
        # SGLang's head has no biases, and other names for the norms behind its first layer.
        if name.startswith("model.layers.") and not name.startswith(last) and not name.endswith(".bias"):
            (index, part), weight = name.removeprefix("model.layers.").split(".", 1), given
            # As many keys as queries, so that the first layer loses no part of a token.
            if "k_proj" in part or "v_proj" in part:
                of_heads = given.unflatten(0, (-1, hidden // num_heads))
                weight = of_heads.repeat_interleave(hidden // len(given), dim=0).flatten(0, 1)
            kept[f"layers.{int(index) + 1}.{part.replace('input_layernorm', 'hidden_norm')}"] = weight
    kept |= {name.replace("layers.1.", "midlayer."): weight for name, weight in kept.items() if "layers.1." in name}
    for part, factor in (("q_proj", 2.0), ("k_proj", 2.0), ("v_proj", 1.0)):
        beside = [factor * torch.eye(hidden), torch.zeros(hidden, hidden)]
        kept[f"midlayer.self_attn.{part}.weight"] = torch.cat(beside, dim=1)
    kept["midlayer.self_attn.o_proj.weight"] = torch.eye(hidden)
    kept["midlayer.mlp.down_proj.weight"] = torch.zeros_like(kept["layers.1.mlp.down_proj.weight"])
    kept["midlayer.input_layernorm.weight"] = torch.ones(hidden)
    kept["fc.weight"] = _share(hidden, 3 * hidden)
    kept["norm.weight"], kept["lm_head.weight"] = drawn["model.norm.weight"], drawn["lm_head.weight"]
    config: Config = _EAGLE3 | {
        "num_hidden_layers": _QWEN_VL.config["num_hidden_layers"],
        "num_key_value_heads": num_heads,
        "rope_scaling": _QWEN_VL.config["rope_scaling"],
    }
    tiny.write_folder(target, config, kept, progress)


def _write_mtp(recipe: tiny.Recipe, target: Path, progress: Progress) -> None:
    layer = f"model.layers.{recipe.config['num_hidden_layers']}."
    norms = ("enorm", "hnorm", "shared_head.norm")
    _write_with_first_layers(target, recipe, [layer], norms, progress)


def _write_mimo(target: Path, progress: Progress) -> None:
    norms = ("enorm", "hnorm", "final_layernorm")
    places = [f"model.mtp.layers.{head}." for head in range(_NUM_HEADS)]
    _write_with_first_layers(target, tiny.MIMO, places, norms, progress)


def _write_with_first_layers(
    target: Path, recipe: tiny.Recipe, places: list[str], norms: tuple[str, ...], progress: Progress
) -> None:
    """A model whose layers above the first are quiet, with the first one at each of `places`, beside `norms`."""
    import torch

    progress("drawing the weights")
    drawn, hidden = tiny.draw_weights(recipe), tiny.HIDDEN
    first = "model.layers.0."
    for name in drawn:
        if not name.startswith(first) and ("o_proj" in name or "down_proj" in name):
            drawn[name] *= _QUIET
    of_first = {name: weight for name, weight in drawn.items() if name.startswith(first)}
    for place in places:
        drawn |= {name.replace(first, place): weight for name, weight in of_first.items()}
        drawn |= {f"{place}{norm}.weight": torch.ones(hidden) for norm in norms}
        drawn[f"{place}eh_proj.weight"] = torch.cat([torch.eye(hidden), _share(hidden, hidden)], dim=1)
    tiny.write_folder(target, recipe.config, drawn, progress)


def _share(rows: int, columns: int) -> torch.Tensor:
    """A seeded matrix that turns a hidden state of variance 1 into a share of `_HIDDEN_SHARE`."""
    import numpy as np
    import torch

    draw = np.random.Generator(np.random.PCG64(20_264))
    signs = np.where(draw.random((rows, columns)) < 0.5, -1.0, 1.0)
    return torch.from_numpy(signs * _HIDDEN_SHARE / np.sqrt(columns)).float()


DRAFTS: Final[dict[str, Callable[[Path, Progress], None]]] = {
    "tiny-gqa-eagle": _write_eagle,
    "tiny-gqa-eagle3": _write_eagle3,
    "tiny-qwen2.5-vl-eagle3": _write_qwen_vl_eagle3,
    "tiny-mtp": partial(_write_mtp, _MTP),
    "tiny-dsa-mtp": partial(_write_mtp, _DSA_MTP),
    "tiny-mimo": _write_mimo,
}
"""The function that writes each of them."""
