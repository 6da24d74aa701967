"""A quicker way to the same observations: texts without anything to normalise skip the patterns."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

import twin
import twin_observe

_slow = twin_observe.normalise
_describe_any_tensor = twin_observe.describe_tensor
_SUSPECT = re.compile(r"twin_|0x|/|File |At:|\bj\d")


def normalise(text: str) -> str:
    """Return what `twin_observe.normalise` returns."""
    return _slow(text) if _SUSPECT.search(text) else text


def thread_state() -> dict[str, Any]:
    """Return what `twin_observe.thread_state` returns; looking makes no Tensor."""
    c = torch._C
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward_grad": c._is_fwd_grad_enabled(),
        "included": c._dispatch_tls_local_include_set().raw_repr(),
        "excluded": c._dispatch_tls_local_exclude_set().raw_repr(),
        "autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ],
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "function_modes": c._len_torch_function_stack(),
        "dispatch_modes": c._len_torch_dispatch_stack(),
        "torch_function": c._is_torch_function_enabled(),
        "torch_function_all_off": c._is_torch_function_all_disabled(),
        "functorch": c._functorch.peek_interpreter_stack() is None,
        "anomaly": torch.is_anomaly_enabled(),
        "multithreading": c._is_multithreading_enabled(),
        "view_replay": c._is_view_replay_enabled(),
        "saved_hooks": c._autograd._saved_tensors_hooks_is_enabled(),
        "tracing": c._get_tracing_state() is not None,
        "default_device": [
            str(mode.device)
            for mode in _get_current_function_mode_stack()
            if isinstance(mode, DeviceContext)
        ],
        "default_dtype": torch.get_default_dtype(),
        "compiling": torch.compiler.is_compiling(),
        "deterministic": c._get_deterministic_algorithms(),
    }


def describe_tensor(tensor: Tensor, names: twin_observe.Names) -> dict[str, Any]:
    """Return what `twin_observe.describe_tensor` returns; plain Tensors without detours."""
    c = torch._C
    if (
        type(tensor) is not Tensor
        or c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._functorch.peek_interpreter_stack() is not None
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_conj()
        or tensor.is_neg()
        or not c._dispatch_keys(tensor).has(c.DispatchKey.CPU)
        or tensor._is_zerotensor()
        or c._functorch.is_functorch_wrapped_tensor(tensor)
        or torch._is_functional_tensor(tensor)
    ):
        return _describe_any_tensor(tensor, names)
    inference = tensor.is_inference()
    base = tensor._base
    try:
        grad_fn = tensor.grad_fn
    except RuntimeError:  # a view of several whose base was changed since
        return _describe_any_tensor(tensor, names)
    with c.DisableTorchFunction():
        storage = tensor.untyped_storage()._cdata
    return {
        "type": "Tensor",
        "is": names.of(tensor),
        "storage": names._storages.get(storage),
        "dtype": str(tensor.dtype),
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "offset": tensor.storage_offset(),
        "version": "inference" if inference else tensor._version,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "is_view": tensor._is_view(),
        "base": None if base is None else names.of(base) or "a base",
        "grad_fn": None if grad_fn is None else normalise(grad_fn.name()),
        "output_nr": tensor.output_nr,
        "inference": inference,
        "keys": c._dispatch_keys(tensor).raw_repr(),
        "data": repr(tensor.tolist()),
    }


@functools.cache
def install() -> None:
    """Make the harness use it, and let PyTorch do and say what it does once in a process."""
    for module in (twin_observe, twin):
        module.normalise = normalise
        module.thread_state = thread_state
    twin_observe.describe_tensor = describe_tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))
