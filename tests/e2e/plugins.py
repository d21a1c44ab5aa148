"""A plugin of SGLang that gives servers under test what a CPU lacks or only a test needs.

A server loads it where `tests/e2e/plugin` is on its `PYTHONPATH`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

_HERE: Final = Path(__file__).resolve().parent
VARIABLE: Final = "PIC_TEST_PLUGINS"
"""Names the functions that a server calls when it starts."""


def environment(*names: str) -> dict[str, str]:
    """The environment of a server that forks its processes, and calls functions when it starts.

    Args:
        names: the functions, as `package.module:function`.
    """
    return _calling(f"{__name__}:fork", *names)


def _calling(*names: str) -> dict[str, str]:
    path = (_HERE / "plugin", _HERE.parent.parent, *filter(None, sys.path))
    return {"PYTHONPATH": os.pathsep.join(map(str, path)), VARIABLE: " ".join(names)}


def register() -> None:
    """Call what the environment names; nothing else is imported before."""
    for name in os.environ[VARIABLE].split():
        module, _, function = name.partition(":")
        getattr(import_module(module), function)()


def fork() -> None:
    """Have the server fork its other processes from the first one, which has imported SGLang and read the tokenizer.

    That is most of a start, and each process would do it again. Users have processes with imports of their own, and so
    has the shared server `smollm2_as_users`.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after(_: None, server_args: Any) -> None:
        from sglang_pic.adapter.startup.tokenizer import read_tokenizer

        multiprocessing.set_start_method("fork", force=True)
        read_tokenizer(server_args)

    read: dict[str, Any] = {}

    def once(get_tokenizer: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in read:
            read[name] = get_tokenizer(name, *args, **kwargs)
        return read[name]

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", after, HookType.AFTER)
    HookRegistry.register("sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer", once, HookType.AROUND)


def log_modules() -> None:
    """Have a process write the names of our modules that it has loaded to its log when it gets SIGUSR2."""

    def log(*_: object) -> None:
        ours = sorted(name for name in sys.modules if name.startswith(("sglang_pic", "pic_")))
        print(MODULES, *ours, file=sys.stderr, flush=True)

    signal.signal(signal.SIGUSR2, log)


MODULES: Final = "loaded modules of sglang_pic:"
"""How that line begins."""


def production_backends() -> None:
    """Have the model runner make its attention backends as `tests/backends/backends.py` does, without their kernels."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def replace(*_: object) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        from tests.backends.backends import BACKENDS

        ATTENTION_BACKENDS.update((name, BACKENDS[name]) for name in ("fa3", "triton"))

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.init_attention_backends", replace, HookType.BEFORE)
    # With deterministic inference SGLang replaces operators of a GPU by its own kernels; there is none here.
    HookRegistry.register(f"{runner}.maybe_enable_batch_invariant_mode", lambda _: None, HookType.REPLACE)


AS_USERS_HAVE_IT: Final = _calling(f"{__name__}:log_modules")
"""What a server is started with whose processes import for themselves, as those of users do."""
_PAGEABLE: Final = "pic_platform.pageable:without_pinned_memory"
PAGEABLE: Final = environment(_PAGEABLE)
"""What a server with LoRA adapters is started with: SGLang keeps their tables and weights in pinned memory."""
PRODUCTION_BACKENDS: Final = {**environment(f"{__name__}:production_backends"), "TRITON_INTERPRET": "1"}
"""What a server on a production attention backend is started with."""


def any_layers() -> None:
    """Have start-up take the best layers of a random model, which finds nothing."""
    from sglang_pic.adapter.startup import asking_layers

    asking_layers.LEAST_FOUND = 0.0  # type: ignore[misc]


ANY_LAYERS: Final = environment(f"{__name__}:any_layers", _PAGEABLE)
