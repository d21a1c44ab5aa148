"""A device on which waiting is an error: what makes the host wait for a GPU raises here, on any machine.

Its tensors hold their values in CPU memory, so results can be compared. To torch they are on the device `meta`, the one
accelerator that every build of torch has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")

aten = torch.ops.aten
# Their result, or its size, is read on the host.
_READ_BACK = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.unique_dim,
    aten._unique2,
    aten.unique_consecutive,
}
_MAKE_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)


class WaitError(Exception):
    """The host would have waited for the device."""


class DeviceTensor(torch.Tensor):
    """A tensor on the strict device; `held` has its values in CPU memory."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.held = values
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {}, pinned=set())


def on_device(values: Tensor) -> Tensor:
    """`values` as a tensor of the strict device; both share memory."""
    return DeviceTensor(values)


def read(tensor: Tensor) -> Tensor:
    """The values of a device tensor, for assertions."""
    assert isinstance(tensor, DeviceTensor), f"{tensor.device}: not on the device"
    return tensor.held


@contextmanager
def strict_device() -> Iterator[_Dispatch]:
    """Raise `WaitError` where the host would wait for the device; what is given tells the copies that were made."""
    dispatch = _Dispatch()
    with dispatch, _FromHost(dispatch):
        yield dispatch


class _FromHost(TorchFunctionMode):
    """`torch.tensor` fills host memory, and then copies it to `device`."""

    def __init__(self, dispatch: _Dispatch) -> None:
        super().__init__()
        self._dispatch = dispatch

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            raise WaitError("new_tensor: numbers are copied from memory that is not pinned.")
        if func in _MAKE_FROM_HOST:
            device, pin = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            if pin:
                self._dispatch.pin(made)
            return made if device is None else made.to(device)
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    """Sees the operators whose operands are all in host memory too: factories, and copies to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()
        """Addresses of the storages that were asked for as pinned."""
        self.kept: list[Tensor] = []
        self.num_copies = 0
        """Copies from the host to the device."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pin = kwargs.pop("pin_memory", None)
        result = _run(op, args, kwargs, pinned=self.pinned)
        if pin:
            self.pin(result)
        self.num_copies += _is_copy_from_host(op, args, kwargs)
        return result

    def pin(self, tensor: Tensor) -> None:
        """Take the memory of a tensor for pinned."""
        # Kept alive, so that no other storage gets its address.
        self.kept.append(tensor)
        self.pinned.add(tensor.untyped_storage().data_ptr())


def _run(op: Any, args: Any, kwargs: Mapping[str, Any], *, pinned: set[int]) -> Any:
    """The operator on CPU values; its results are on the device where its operands, or `device`, are."""
    _refuse_waits(op, args, kwargs, pinned)
    tensors = [each for each in _leaves((args, kwargs)) if isinstance(each, DeviceTensor)]
    target = kwargs.get("device")
    to_device = _is_device(target) if target is not None else bool(tensors)
    plain = {**kwargs, "device": torch.device("cpu")} if target is not None else kwargs
    own = {id(each.held): each for each in tensors}

    def unwrap(each: Any) -> Any:
        return each.held if isinstance(each, DeviceTensor) else each

    def wrap(each: Any) -> Any:
        if not to_device or not isinstance(each, Tensor) or isinstance(each, DeviceTensor):
            return each
        return own[id(each)] if id(each) in own else DeviceTensor(each)

    return tree_map(wrap, op(*tree_map(unwrap, args), **tree_map(unwrap, plain)))


def _refuse_waits(op: Any, args: Any, kwargs: Mapping[str, Any], pinned: set[int]) -> None:
    packet = op.overloadpacket
    has_device = any(isinstance(each, DeviceTensor) for each in _leaves((args, kwargs)))
    if packet in _READ_BACK and has_device:
        raise WaitError(f"{op}: the host reads what the device computed.")
    if packet is aten.repeat_interleave and has_device and kwargs.get("output_size") is None:
        raise WaitError(f"{op}: without output_size the host reads how long the result is.")
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_) and has_device:
        for index in (each for each in args[1] if each is not None):
            if index.dtype in (torch.bool, torch.uint8):
                raise WaitError(f"{op}: the host reads how many elements a mask selects.")
            if not isinstance(index, DeviceTensor) and index.dim():
                raise WaitError(f"{op}: indices are copied from host memory that is not pinned.")
    if packet is aten._to_copy and isinstance(args[0], DeviceTensor) and not _is_device(kwargs.get("device", DEVICE)):
        raise WaitError(f"{op}: the host waits for a copy from the device.")
    if packet is aten.copy_ and isinstance(args[1], DeviceTensor) and not isinstance(args[0], DeviceTensor):
        is_pinned = args[0].untyped_storage().data_ptr() in pinned
        if is_pinned and (kwargs.get("non_blocking") or args[2:3] == (True,)):
            return
        raise WaitError(f"{op}: the host waits for a copy from the device.")
    if _is_copy_from_host(op, args, kwargs):
        source = args[0] if packet is aten._to_copy else args[1]
        if source.untyped_storage().data_ptr() not in pinned:
            raise WaitError(f"{op}: {tuple(source.shape)} {source.dtype} are copied from memory that is not pinned.")
        if not (kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2])):
            raise WaitError(f"{op}: {tuple(source.shape)} {source.dtype} are copied with non_blocking=False.")


def _is_copy_from_host(op: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    packet = op.overloadpacket
    if packet is aten._to_copy:
        return not isinstance(args[0], DeviceTensor) and _is_device(kwargs.get("device"))
    if packet is aten.copy_:
        return isinstance(args[0], DeviceTensor) and not isinstance(args[1], DeviceTensor)
    return False


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found
