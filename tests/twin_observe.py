"""What the twin harness sees of a call: values, tensors, thread state, errors, kernel entries."""

import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

TESTS = str(Path(__file__).parent)
NAMESPACES = ("twin_torch", "twin_hotop")
_RULES = [
    # The Python frames that pybind11 adds to a conversion error: they name PyTorch's wrappers.
    (re.compile(r"At:\n(?: +.*\(\d+\): .*\n?)+"), "At: frames\n"),
    # The frames of a forward call that anomaly mode prints.
    (re.compile(r"(?: +File \".*\n(?:    .*\n)?)+"), "frames\n"),
    (re.compile(r"\b0x[0-9a-f]+"), "0x"),
    (re.compile(r"(?:/[\w.+\-@ ]+)+\.(?:py|cpp|h|pyx|so)(?::\d+|\", line \d+)?"), "FILE"),
    (re.compile(r"\bj\d+\b"), "j"),  # the numbered symbol of a jagged dimension
]


def normalise(text: str) -> str:
    """Return a text without what must differ: the namespace, addresses, files."""
    for namespace in NAMESPACES:
        text = text.replace(namespace, "NS")
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def attempt(function: Callable[[], Any]) -> Any:
    """Return what a look gives, or the type of the error that it raises."""
    try:
        return function()
    except Exception as error:
        return f"<{type(error).__name__}>"


class Names:
    """Names for objects and storages, so that identity and aliasing can be told by text."""

    def __init__(self) -> None:
        """Start without any names."""
        self._objects: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._alive: list[Any] = []

    def add(self, path: str, value: Any) -> None:
        """Name a value, its elements and the storages of its tensors (first name wins)."""
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            self._objects.setdefault(id(value), path)
            storage = storage_id(value)
            if storage is not None:
                self._storages.setdefault(storage, path)
        elif isinstance(value, list | tuple):
            if isinstance(value, list):  # a tuple's identity tells nothing: it cannot change
                self._objects.setdefault(id(value), path)
            for index, element in enumerate(value):
                self.add(f"{path}[{index}]", element)
        elif isinstance(value, dict):
            for key, element in value.items():
                self.add(f"{path}[{key}]", element)

    def of(self, value: Any) -> str | None:
        """Return the name of this very object."""
        return self._objects.get(id(value))

    def storage_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the first tensor that has this tensor's storage."""
        storage = storage_id(tensor)
        return None if storage is None else self._storages.get(storage)


def storage_id(tensor: torch.Tensor) -> int | None:
    """Return what identifies a tensor's storage, None where it has none."""
    with torch._C.DisableTorchFunction():
        found = attempt(lambda: tensor.untyped_storage()._cdata)
    return found if isinstance(found, int) else None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from tensors_in(element)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _data(tensor: torch.Tensor) -> Any:
    if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        return "no data"
    if tensor._is_zerotensor():
        return "zero tensor"
    dense = tensor.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    return repr(dense.resolve_conj().resolve_neg().tolist())


def describe_tensor(tensor: torch.Tensor, names: Names) -> dict[str, Any]:
    """Return everything that a program can observe on a tensor."""
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    with torch._C.DisableTorchFunction(), modes:  # looking must not show in the logs of modes
        looks: dict[str, Callable[[], Any]] = {
            "dtype": lambda: str(tensor.dtype),
            "device": lambda: str(tensor.device),
            "layout": lambda: str(tensor.layout),
            "shape": lambda: normalise(repr(tuple(tensor.shape))),
            "stride": lambda: normalise(repr(tensor.stride())),
            "offset": lambda: tensor.storage_offset(),
            "version": lambda: tensor._version,
            "requires_grad": lambda: tensor.requires_grad,
            "is_leaf": lambda: tensor.is_leaf,
            "is_view": lambda: tensor._is_view(),
            "base": lambda: None if tensor._base is None else names.of(tensor._base) or "a base",
            "grad_fn": lambda: None if tensor.grad_fn is None else normalise(tensor.grad_fn.name()),
            "output_nr": lambda: tensor.output_nr,
            "inference": lambda: tensor.is_inference(),
            "keys": lambda: str(torch._C._dispatch_keys(tensor)),
            "data": lambda: _data(tensor),
        }
        seen = {name: attempt(look) for name, look in looks.items()}
    return {
        "type": type(tensor).__qualname__,
        "is": names.of(tensor),
        "storage": names.storage_of(tensor),
        **seen,
    }


def describe(value: Any, names: Names) -> Any:
    """Return a value as nested plain data that can be compared by equality."""
    if isinstance(value, torch.Tensor):
        return describe_tensor(value, names)
    if isinstance(value, list | tuple):
        return {
            "type": type(value).__qualname__,
            "is": names.of(value),
            **{f"[{index}]": describe(element, names) for index, element in enumerate(value)},
            "length": len(value),
        }
    if isinstance(value, dict):
        return {str(key): describe(element, names) for key, element in value.items()}
    return f"{type(value).__qualname__} {normalise(attempt(lambda: repr(value)))}"


def thread_state() -> dict[str, Any]:
    """Return the thread-local state that decides how an operator call behaves."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward_grad": torch._C._is_fwd_grad_enabled(),
        "included": str(torch._C._dispatch_tls_local_include_set()),
        "excluded": str(torch._C._dispatch_tls_local_exclude_set()),
        "autocast": [
            (device, torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device)))
            for device in ("cpu", "cuda")
        ],
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "function_modes": torch._C._len_torch_function_stack(),
        "dispatch_modes": torch._C._len_torch_dispatch_stack(),
        "torch_function": torch._C._is_torch_function_enabled(),
        "torch_function_all_off": torch._C._is_torch_function_all_disabled(),
        "functorch": str(torch._C._functorch.peek_interpreter_stack() is None),
        "anomaly": torch.is_anomaly_enabled(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "view_replay": torch._C._is_view_replay_enabled(),
        "saved_hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "tracing": torch._C._get_tracing_state() is not None,
        "default_device": str(torch.get_default_device()),
        "default_dtype": str(torch.get_default_dtype()),
        "compiling": torch.compiler.is_compiling(),
    }


def describe_error(error: BaseException, raised_by_kernel: list[BaseException]) -> dict[str, Any]:
    """Return what a program that catches an error can observe."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "text": normalise(str(error)),
        "args": len(error.args),
        "kernel's own": any(error is own for own in raised_by_kernel),
        "cause": type(error.__cause__).__name__,
        "context": type(error.__context__).__name__,
        "frames": [f.name for f in frames if f.filename.startswith((TESTS, "<twin"))],
    }


class Log:
    """The kernel entries of one observed call."""

    def __init__(self, names: Names) -> None:
        """Start empty; names are those of the caller's arguments."""
        self.names = names
        self.entries: list[dict[str, Any]] = []
        self.raised: list[BaseException] = []
        self.direct: list[bool] = []

    def enter(self, kernel: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record what a kernel received and its thread state, then run it."""
        # Two frames up is the recording wrapper; in a direct call the caller stands above it.
        self.direct.append(sys._getframe(3).f_code.co_name == "observe")
        entry = {"kernel": kernel.__name__, "state": thread_state(), "count": len(args)}
        entry["args"] = [describe(value, self.names) for value in args]
        entry["kwargs"] = describe(kwargs, self.names)
        self.entries.append(entry)
        try:
            result = kernel(*args, **kwargs)
        except BaseException as error:
            self.raised.append(error)
            raise
        entry["state at return"] = thread_state()
        entry["returned"] = describe(result, self.names)
        self.names.add("returned", result)
        return result


# One log for the whole process and not per thread: kernels may run in other threads (autograd).
_current: list[Log] = []


def enter_kernel(kernel: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a kernel, recorded if a call is being observed."""
    return _current[-1].enter(kernel, args, kwargs) if _current else kernel(*args, **kwargs)


def push_log(log: Log) -> None:
    """Make a log the one that kernels write to."""
    _current.append(log)


def pop_log() -> None:
    """End the latest log."""
    _current.pop()


def kernel_name(kernel: Callable) -> str:
    """Return a kernel's name as an identifier."""
    return "anonymous" if kernel.__name__ == "<lambda>" else kernel.__name__


def recorded(kernel: Callable, *, varargs: bool = False) -> Callable:
    """Wrap a kernel so that an observed call records what it received.

    Args:
        kernel: The function.
        varargs: Take `*args, **kwargs`, which shows how many arguments were passed; otherwise
            the wrapper is a plain function with the kernel's own parameters and defaults.
    """
    if varargs:

        @functools.wraps(kernel)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return enter_kernel(kernel, args, kwargs)

        return wrapper
    parameters = inspect.signature(kernel).parameters.values()
    defaults = {
        f"_default_{p.name}": p.default for p in parameters if p.default is not inspect._empty
    }
    head, positional, keyword = [], [], []
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            return recorded(kernel, varargs=True)
        if p.kind is p.KEYWORD_ONLY:
            if not keyword:
                head.append("*")
            keyword.append(f"{p.name!r}: {p.name}")
        else:
            positional.append(f"{p.name},")
        head.append(p.name + (f"=_default_{p.name}" if f"_default_{p.name}" in defaults else ""))
    name = kernel_name(kernel)
    source = (
        f"def {name}({', '.join(head)}):\n"
        f"    return _enter(_kernel, ({' '.join(positional)}), {{{', '.join(keyword)}}})\n"
    )
    scope = {"_enter": enter_kernel, "_kernel": kernel, **defaults}
    exec(compile(source, f"<twin {name}>", "exec"), scope)
    plain = scope[name]
    plain.__annotations__ = dict(kernel.__annotations__)
    plain.__module__ = kernel.__module__
    return plain
