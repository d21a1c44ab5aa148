"""The platform class that SGLang instantiates in every process: the defaults of a CPU server."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from pic_platform import ATTENTION_BACKEND, host_tier, registration, slot_ops, speculation

if TYPE_CHECKING:
    import torch
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOTAL_TOKENS = 65_536
"""Tokens of the KV pool where `--max-total-tokens` is not given: 1.4 GiB for SmolLM2-135M in bf16."""

DEFAULT_MEM_FRACTION = 0.5
"""Share of the free memory for weights and KV pool together where `--mem-fraction-static` is not given."""

_CONV_VARIABLE = "SGLANG_MAMBA_CONV_DTYPE"
_BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
_BALANCE_VARIABLE = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"


class PicCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU with no compiled kernels: native PyTorch operators and the attention backend `pic_cpu`."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        """Announce the backend's name, so that the argument parser knows it."""
        registration.register_choice()

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Set the arguments that this platform needs, where the operator has set none.

        SGLang's rule for `--device cpu` has run before and named its AMX backend, which cannot run here.
        """
        if server_args.device != self.device_type:
            return
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        # For gpt-oss SGLang would take the experts of the package triton_kernels where that is installed.
        if server_args.moe_runner_backend == "auto":
            server_args.moe_runner_backend = "triton"
        # The scheduler's idle loop would otherwise take a whole core from the model and from the clients.
        server_args.sleep_on_idle = True
        # SGLang sizes the KV pool by the free memory, which on a CPU other processes need too.
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = DEFAULT_MEM_FRACTION
        server_args.hicache_io_backend = host_tier.IO_BACKEND
        # The convolution states of layers with recurrent state are copied without a cast; SGLang has them in bfloat16.
        if server_args.dtype == "float32":
            os.environ.setdefault(_CONV_VARIABLE, server_args.dtype)
        # OpenMP reads this when a worker starts. Its threads otherwise spin at the end of every operator, and wait out
        # the time slices of anything else on the same cores: 2 cores, load 5, one decode step's matrices in bf16 took
        # 825 ms spinning and 19 ms sleeping.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
        num_ranks = server_args.tp_size * server_args.pp_size * replicas
        if num_ranks > 1:
            _share_machine(num_ranks)

    def get_default_attention_backend(self) -> str:
        """The backend for a server whose operator named none."""
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Whether the operators of an algorithm are there in plain PyTorch."""
        return algorithm in speculation.ALGORITHMS

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Whether states are copied while a pass goes on (`linear_state.py`)."""
        return True

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """The slots that a verified tree is written to."""
        return slot_ops.slots_between

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """Keep SGLang's own worker, over operators in plain PyTorch."""
        speculation.install()
        return None

    def get_dispatch_key_name(self) -> str:
        """Every fused operator runs its native PyTorch form."""
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """No compiler: decorated functions run as written."""
        return "eager"

    def init_backend(self) -> None:
        """Set up a worker process; called when its model runner is imported."""
        registration.register_backend()

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        """The device as a name: SGLang compares the default of `--device` with strings."""
        return self.device_type


def _share_machine(num_ranks: int) -> None:
    """Give every rank its own cores; SGLang's own rule goes by NUMA node and refuses fewer nodes than ranks.

    SGLang also ends a server whose ranks find different amounts of free memory. Here they all have the same memory, and
    any other process changes how much of it is free while they start.
    """
    os.environ.setdefault(_BALANCE_VARIABLE, "0")
    cores = sorted(os.sched_getaffinity(0))
    # With all cores for every rank they would wait for each other at every operator.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores) // num_ranks)))
    if os.environ.get(_BIND_VARIABLE):
        return
    groups = [cores[rank::num_ranks] or [cores[rank % len(cores)]] for rank in range(num_ranks)]
    os.environ[_BIND_VARIABLE] = "|".join(",".join(map(str, group)) for group in groups)
    logger.info("%s=%s (set by the platform pic_cpu)", _BIND_VARIABLE, os.environ[_BIND_VARIABLE])
