"""Resolves a server's arguments and model as SGLang does, without weights or processes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch

from sglang_pic.adapter.doctor.cards import pretend
from sglang_pic.adapter.doctor.model_folder import check_model
from sglang_pic.adapter.serve.frontend import BACKEND_NAME
from sglang_pic.adapter.support import prefill_backend
from sglang_pic.errors import ConfigError, PicError, UnsupportedError


class Resolved(NamedTuple):
    """The resolved arguments of a server."""

    context: Any
    """A stand-in for SGLang's `TreeCacheBuildContext` with the members that refusals read."""
    view: Any
    """The server's arguments as SGLang resolved them."""
    dtype: torch.dtype
    """Of the KV rows."""
    rotary: object
    """The rotary embedding, partly built; None if only the loaded model determines it."""
    pool: str | None = None
    """The support entry of a KV pool that start-up would refuse, if the arguments determine it."""

    @property
    def embedding(self) -> str | None:
        """Class of the rotary embedding."""
        if self.architecture in _WITH_GEMMA3_ROPE:
            return "Gemma3RotaryEmbedding"
        return None if self.rotary is None else type(self.rotary).__name__

    @property
    def architecture(self) -> str:
        """The model's class."""
        return str(self.context.model_config.hf_config.architectures[0])

    @property
    def attention(self) -> str:
        """The prefill attention backend."""
        return prefill_backend(self.context.tp_worker.model_runner)


@contextlib.contextmanager
def resolve(model: str, flags: Sequence[str], *, card: str | None) -> Iterator[Resolved]:
    """Resolve the arguments of `sglang serve model --radix-cache-backend pic flags`.

    In the context SGLang sees the card. Environment variables that SGLang sets are restored afterwards.

    Raises:
        ConfigError: there is no such model, a flag is none of SGLang's, or the flags take another cache.
        UnsupportedError: SGLang itself refuses the arguments, cannot use the model's configuration, here or in the
            context, or does not know the plugin.
    """
    check_model(model)
    with pretend(card), _quiet(), patch.dict(os.environ):
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.mem_cache.registry import registered_radix_cache_backends

        if BACKEND_NAME not in registered_radix_cache_backends():
            raise UnsupportedError(
                "SGLang does not know the plugin: it finds plugins by their entry points. Install the package "
                "(`pip install .` in the repository) into the environment that SGLang runs in, and name "
                f"pic in SGLANG_PLUGINS if you set it (it is {os.environ.get('SGLANG_PLUGINS', '')!r})."
            )
        device = ["--device", "cuda"] if card is not None else []
        args = _parse(["--model-path", model, "--radix-cache-backend", BACKEND_NAME, *device, *flags])
        if args.radix_cache_backend != BACKEND_NAME:
            other = f"--radix-cache-backend {args.radix_cache_backend}"
            raise ConfigError(f"server flags: {other} takes another cache than this plugin's; leave it out.")
        try:
            yield _read(args)
        except PicError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            config = f"the configuration of {model!r} cannot be used: {type(error).__name__}: {text}"
            raise UnsupportedError(f"{config}; name another checkpoint.") from error


def _parse(argv: list[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return prepare_server_args(argv)
    except SystemExit as stop:
        # argparse ends the process with its usage and one line that names the error.
        line = said.getvalue().strip().splitlines()[-1] if said.getvalue().strip() else f"exit code {stop.code}"
        raise ConfigError(f"server flags: {line.removeprefix('sglang serve: error: ')}") from stop


def _read(args: Any) -> Resolved:
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, resolved_view
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

    try:
        args.resolve_once()
        model_config = model_config_of(args)
    except (ValueError, AssertionError, NotImplementedError, ImportError, OSError) as error:
        # A bare assertion says something by its line only.
        text = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        raise UnsupportedError(f"SGLang itself refuses these arguments: {text}") from error
    view = resolved_view(args)
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=view.kv_cache_dtype,
        model=None,
        model_dtype=model_config.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    runner = SimpleNamespace(
        prefill_attention_backend_str=attention_backends_of(view)[0],
        use_mla_backend=model_config.attention_arch == AttentionArch.MLA,
        # SGLang asks the model itself, which is not built here: of its classes this one says so.
        prefill_aware_swa=model_config.hf_config.architectures[0] == "UnlimitedOCRForCausalLM",
        # Where no flag says it, SGLang makes the pool as large as memory allows.
        req_to_token_pool=SimpleNamespace(size=view.max_running_requests or 1 << 10),
    )
    context = SimpleNamespace(
        server_args=args,
        model_config=model_config,
        tp_worker=SimpleNamespace(model_runner=runner),
        is_hybrid_swa=model_config.is_hybrid_swa,
        # SGLang makes a pool of no slots if no layer needs one.
        full_tokens_per_layer=None if model_config.full_attention_layer_ids != [] else 0,
        is_hybrid_ssm=_has_state(model_config),
        is_dsa=is_deepseek_dsa(model_config.hf_config),
        disable_radix_cache=view.disable_radix_cache,
        enable_hierarchical_cache=view.enable_hierarchical_cache,
    )
    return Resolved(context, view, dtype, _rotary_of(model_config), _refused_pool(context))


def _refused_pool(context: Any) -> str | None:
    from sglang.srt.arg_groups.overrides import post_capture_kv_sizing_planned
    from sglang.srt.environ import envs

    if envs.SGLANG_USE_HND_KVCACHE.get() and not context.tp_worker.model_runner.use_mla_backend:
        return "use_hnd other than False"
    if post_capture_kv_sizing_planned(context.server_args):
        return "post_capture_active other than False"
    return None


def _has_state(model_config: Any) -> bool:
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    try:
        return bool(uses_ssm_state(model_config))
    except ValueError:
        # How large Inkling's state is depends on the server's processes, which are not there.
        return True


# Their configurations do not name the rotary embedding that turns their keys (`runtime/rope.py`).
_WITH_GEMMA3_ROPE: Final = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")


class _Found(Exception):
    """Carries a rotary embedding out before its table is built, which may need kernels that are not installed."""


def _rotary_of(model_config: Any) -> object:
    """The rotary embedding that SGLang's models build for the configuration's scaling."""
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding, get_rope
    from sglang.srt.utils.hf_transformers.common import get_rope_config

    def found(self: Any, _size: int, _dim: int, max_position_embeddings: int, *_: object, **__: object) -> None:
        self.max_position_embeddings = max_position_embeddings
        raise _Found(self)

    config = model_config.hf_text_config
    theta, scaling = get_rope_config(config)
    head_dim = getattr(config, "qk_rope_head_dim", None) or model_config.head_dim
    if scaling and scaling.get("rope_type", scaling.get("type")) == "yarn" and hasattr(config, "kv_lora_rank"):
        scaling = {**scaling, "rope_type": "deepseek_yarn"}  # as its models rename it
    dual_chunk = getattr(config, "dual_chunk_attention_config", None)
    try:
        with patch.object(RotaryEmbedding, "__init__", found):
            return get_rope(
                *(head_dim, head_dim, getattr(config, "max_position_embeddings", model_config.context_len), theta),
                rope_scaling=scaling or None,
                dual_chunk_attention_config=dual_chunk,
            )
    except _Found as found_rotary:
        return found_rotary.args[0]
    except (ImportError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress SGLang's log and warnings while it resolves arguments."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
