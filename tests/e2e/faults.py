"""A plugin of SGLang that raises inside the serving path, for the requests that ask for it.

A request names a stage of `STAGES` as `custom_params: {"fault": ...}`; every other request is served as if the plugin
were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

from tests.e2e import plugins

ENVIRONMENT: Final = plugins.environment(f"{__name__}:register")
"""What such a server is started with."""

STAGES: Final = {
    "options": "fault_options",
    "plan": "fault_plan",
    "resolve": "fault_resolve",
    "admission": "fault_plan",
    "accounting": "fault_accounting",
    "lay_out": "fault_gaps",
    "splice": "fault_splice",
    "narrow": "fault_gaps",
    "pass": "fault_gaps",
    "publication": "fault_publication",
    "pins": "fault_pins",
    "audit": "fault_audit",
}
"""Where a request can have a fault, and the reason that it is counted by."""


class InjectedError(Exception):
    """Nothing of ours or SGLang's raises this."""


def register() -> None:
    """Wrap the serving path of a scheduler when it makes its cache; nothing is imported before."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.mem_cache.registry.create_tree_cache", _install, HookType.BEFORE)


def _install(*_: object) -> None:
    from sglang.srt.models.deepseek_v2 import DeepseekV2DecoderLayer
    from sglang.srt.models.llama import LlamaDecoderLayer

    from sglang_pic.adapter.features.audit.audit import Audit
    from sglang_pic.adapter.features.pins import Pins
    from sglang_pic.adapter.serve import receive as reception
    from sglang_pic.adapter.serve.account import Accounting
    from sglang_pic.adapter.serve.forward import ForwardPath
    from sglang_pic.adapter.serve.gap_batch import GapBatch
    from sglang_pic.adapter.serve.planning import Planning
    from sglang_pic.adapter.serve.publish import Publication
    from sglang_pic.adapter.serve.rows import TreeRows
    from sglang_pic.adapter.serve.state import RequestState

    armed: set[str] = set()
    """Stages that see no request, and are to raise the next time."""

    def of_req(stage: str, *later: str) -> Callable[..., None]:
        """Raise for the request among the arguments, or have later stages raise for it."""

        def look(_: object, *args: Any, **__: object) -> None:
            wanted = _wanted([args[0]])
            armed.update(wanted & {*later})
            _raise(stage, stage in wanted)

        return look

    def of_batch(_: object, plans: Sequence[Any], batch: Any, *__: object) -> None:
        wanted = _wanted([req for req, plan in zip(batch.reqs, plans, strict=True) if plan is not None])
        armed.update(wanted & {"splice", "narrow", "pass"})
        _raise("lay_out", "lay_out" in wanted)

    def of_armed(stage: str) -> Callable[..., None]:
        def look(*_: object, **__: object) -> None:
            was_armed = stage in armed
            armed.discard(stage)
            _raise(stage, was_armed)

        return look

    def of_layer(layer: Any, *_: object, **__: object) -> None:
        # In the middle: the rows of the first layer are written.
        if _layer_id(layer):
            of_armed("pass")()

    _before(reception, "parse_options", _of_parameters)
    _before(Planning, "plan", of_req("plan", "resolve", "admission"))
    _before(TreeRows, "_find", of_armed("resolve"))
    _before(RequestState, "admit", of_armed("admission"))
    _before(Accounting, "count_admitted", of_req("accounting"))
    _before(ForwardPath, "lay_out", of_batch)
    _before(ForwardPath, "move_rows", of_armed("splice"))
    _before(GapBatch, "_narrow_fields", of_armed("narrow"))
    _before(LlamaDecoderLayer, "forward", of_layer)
    _before(DeepseekV2DecoderLayer, "forward", of_layer)
    _before(Publication, "publish", of_req("publication"))
    _before(Pins, "on_released", of_req("pins"))
    _before(Audit, "_keep", of_req("audit"))


def _of_parameters(custom_params: Any) -> None:
    _raise("options", isinstance(custom_params, dict) and custom_params.get("fault") == "options")


def _layer_id(layer: Any) -> int:
    # MLA has an attention for absorbed queries.
    attention = getattr(layer.self_attn, "attn_mqa", None) or layer.self_attn.attn
    return int(attention.layer_id)


def _wanted(reqs: Sequence[Any]) -> set[str]:
    """The stages that requests name; each of them has one fault."""
    found = [req.sampling_params.custom_params for req in reqs if not req.pic.is_faulty]
    return {params["fault"] for params in found if isinstance(params, dict) and "fault" in params}


def _raise(stage: str, is_wanted: bool) -> None:
    if is_wanted:
        raise InjectedError(f"in {stage}")


def _before(owner: Any, name: str, look: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)
