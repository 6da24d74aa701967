"""What of a process a tactic can leave behind: settings and random generators."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

from hotop.tuner._say import say

Settings = dict[str, Any]


@dataclass(frozen=True)
class _Setting:
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    # Put back without a word: what a module changes when it is first imported.
    is_quiet: bool = False


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _leave_modes(stack: str) -> _Setting:
    """Modes are entered and left; what was left behind on top is taken off."""
    length = getattr(torch._C, f"_len_torch_{stack}_stack")
    pop: Any = overrides._pop_mode if stack == "function" else _python_dispatch._pop_mode

    def cut(before: int) -> None:
        while length() > before:
            pop()

    return _Setting(length, cut)


_left_inference_guards: list[Any] = []


def _set_inference_mode(active: bool) -> None:
    # PyTorch has no setter; a guard that never leaves is one.
    guard = torch._C._InferenceMode(active)
    guard.__enter__()
    _left_inference_guards.append(guard)


_tiny, _one = 5e-324, 1.0


def _autocast(device_type: str) -> dict[str, _Setting]:
    return {
        f"autocast for {device_type}": _Setting(
            lambda: torch.is_autocast_enabled(device_type),
            lambda on: torch.set_autocast_enabled(device_type, on),
        ),
        f"the autocast dtype for {device_type}": _Setting(
            lambda: torch.get_autocast_dtype(device_type),
            lambda dtype: torch.set_autocast_dtype(device_type, dtype),
        ),
    }


def _of_pytorch(what: str, suffix: str) -> dict[str, _Setting]:
    get = getattr(torch._C, f"_get_{suffix}", None)
    put = getattr(torch._C, f"_set_{suffix}", None)
    return {what: _Setting(get, put)} if get is not None and put is not None else {}


def _sdp(kind: str) -> dict[str, _Setting]:
    get = getattr(torch._C, f"_get_{kind}_sdp_enabled")
    put = getattr(torch._C, f"_set_sdp_use_{kind}")
    return {f"the {kind} attention": _Setting(get, put)}


_PRECISIONS = (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul"))


def _float32_precision() -> tuple[str, ...]:
    each = (torch._C._get_fp32_precision_getter(*which) for which in _PRECISIONS)
    return torch.get_float32_matmul_precision(), *each


def _set_float32_precision(before: tuple[str, ...]) -> None:
    torch.set_float32_matmul_precision(before[0])  # it sets the others too
    for which, precision in zip(_PRECISIONS, before[1:], strict=True):
        torch._C._set_fp32_precision_setter(*which, precision)


def _numpy_errors() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _set_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _cuda(what: str) -> _Setting:
    get, put = getattr(torch.cuda, f"current_{what}"), getattr(torch.cuda, f"set_{what}")
    up = torch.cuda.is_initialized
    return _Setting(
        lambda: get() if up() else None,
        lambda before: put(before) if before is not None else None,
    )


# The order matters to the setters: inference mode sets grad mode too.
_SETTINGS: dict[str, _Setting] = {
    "inference mode": _Setting(torch.is_inference_mode_enabled, _set_inference_mode),
    "grad mode": _Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
    "forward-mode grad": _Setting(
        torch._C._is_fwd_grad_enabled,
        torch._C._set_fwd_grad_enabled,
    ),
    "multithreaded backward": _Setting(
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
    ),
    "the default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "the default device": _Setting(_default_device, torch.set_default_device),
    "the stack of function modes": _leave_modes("function"),
    "the stack of dispatch modes": _leave_modes("dispatch"),
    "the number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": _Setting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "anomaly mode": _Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda before: torch.set_anomaly_enabled(*before),
    ),
    "warn_always": _Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    "flushing of denormals": _Setting(lambda: _tiny * _one == 0, torch.set_flush_denormal),
    "the autocast cache": _Setting(
        torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    ),
    **_autocast("cpu"),
    **_autocast("cuda"),
    **_of_pytorch("filling of fresh memory", "deterministic_fill_uninitialized_memory"),
    **_of_pytorch("cudnn.enabled", "cudnn_enabled"),
    **_of_pytorch("cudnn.benchmark", "cudnn_benchmark"),
    **_of_pytorch("cudnn.deterministic", "cudnn_deterministic"),
    **_of_pytorch("cudnn.allow_tf32", "cudnn_allow_tf32"),
    **_of_pytorch("mkldnn.enabled", "mkldnn_enabled"),
    **_of_pytorch("mkldnn.deterministic", "mkldnn_deterministic"),
    **_of_pytorch("nnpack.enabled", "nnpack_enabled"),
    **_of_pytorch("the linalg library", "linalg_preferred_backend"),
    **_sdp("flash"),
    **_sdp("mem_efficient"),
    **_sdp("math"),
    **_sdp("cudnn"),
    "the float32 matmul precision": _Setting(_float32_precision, _set_float32_precision),
    "the current CUDA device": _cuda("device"),
    "the current CUDA stream": _cuda("stream"),
    "the environment": _Setting(os.environ.copy, _set_environment, is_quiet=True),
    "the working directory": _Setting(os.getcwd, os.chdir),
    "the warnings filters": _Setting(lambda: list(warnings.filters), _set_filters, is_quiet=True),
    "the recursion limit": _Setting(sys.getrecursionlimit, sys.setrecursionlimit, is_quiet=True),
    "the switch interval": _Setting(sys.getswitchinterval, sys.setswitchinterval),
    "NumPy's error state": _Setting(
        _numpy_errors, lambda before: before and sys.modules["numpy"].seterr(**before)
    ),
    "the length of numbers in text": _Setting(
        sys.get_int_max_str_digits, sys.set_int_max_str_digits
    ),
    "the trace function": _Setting(sys.gettrace, sys.settrace),
    "the profile function": _Setting(sys.getprofile, sys.setprofile),
    "the thresholds of garbage collection": _Setting(
        gc.get_threshold, lambda before: gc.set_threshold(*before)
    ),
    "garbage collection": _Setting(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
}


def settings() -> Settings:
    """Return what is set now; a setting that cannot be read is None."""
    found = {}
    for name, setting in _SETTINGS.items():
        try:
            found[name] = setting.get()
        except (RuntimeError, OSError):
            found[name] = None
    return found


def put_back(before: Settings) -> dict[str, Any]:
    """Set again what was changed, and return what tells of a tactic, and what it was changed to."""
    after = settings()
    changed = {name: after[name] for name, value in before.items() if after[name] != value}
    for name in changed:
        try:
            _SETTINGS[name].set(before[name])
        except Exception as error:
            say(f"tuning changed {name} from {before[name]!r} and cannot set it back: {error}")
    if "inference mode" in changed:  # it sets others
        put_back(before)
    return {name: value for name, value in changed.items() if not _SETTINGS[name].is_quiet}


@dataclass(frozen=True)
class RandomState:
    """The states of the random generators: PyTorch's, Python's and NumPy's."""

    cpu: torch.Tensor
    cuda: dict[int, torch.Tensor]
    python: Any
    numpy: Any

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy_random().set_state(self.numpy)

    def is_equal(self, other: RandomState) -> bool:
        """Return whether both give the same numbers."""
        return (
            torch.equal(self.cpu, other.cpu)
            and all(torch.equal(state, other.cuda[index]) for index, state in self.cuda.items())
            and self.python == other.python
            and _numpy_words(self.numpy) == _numpy_words(other.numpy)
        )


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else getattr(numpy, "random", None)


def _numpy_words(state: Any) -> Any:
    return None if state is None else (state[0], state[1].tobytes(), *state[2:])


def random_state(cuda_devices: Iterable[int]) -> RandomState:
    """Return the states of the generators of this process and of these CUDA devices."""
    numpy = _numpy_random()
    return RandomState(
        torch.get_rng_state(),
        {index: torch.cuda.get_rng_state(index) for index in cuda_devices},
        random.getstate(),
        None if numpy is None else numpy.get_state(),
    )


_autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for _key in (torch._C.DispatchKey.AutocastCUDA, torch._C.DispatchKey.AutocastXPU):
    _autocast_keys = _autocast_keys | torch._C.DispatchKeySet(_key)


def without_autocast() -> Any:
    """Let the tuner's own operators run as written, where the caller's run under autocast."""
    return torch._C._ExcludeDispatchKeyGuard(_autocast_keys)


@contextmanager
def kept(cuda_devices: Iterable[int]) -> Iterator[tuple[Settings, RandomState]]:
    """Leave settings and generators as they were, whatever runs inside."""
    before, generators = settings(), random_state(cuda_devices)
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    try:
        with torch._C._ForceDispatchKeyGuard(*keys):
            yield before, generators
    finally:
        put_back(before)
        generators.restore()
