"""Ops, tensor kinds and contexts that the twin tests combine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from twin import HOWS, Arguments, Twin
from twin_observe import recorded

BF16 = torch.bfloat16


def scale(x: Tensor, n: int = 2) -> Tensor:
    return x * n


def many(xs: list[Tensor], y: Tensor | None = None, n: int = 2) -> list[Tensor]:
    return [x * n for x in xs]


def bump(x: Tensor, n: int = 1) -> Tensor:
    x.add_(n)
    return x * 2


def makes(x: Tensor) -> Tensor:
    return torch.ones(2) + torch.tensor([1.0, 2.0]) + torch.zeros_like(x.cpu())


def modes_inside(x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", BF16):
        y = x @ x
    with torch.enable_grad():
        return y.float() + torch.is_grad_enabled()


def _scale_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.n = inputs[1]


def _with_formula(op: Any) -> None:
    op.register_autograd(lambda ctx, grad: (grad * ctx.n, None), setup_context=_scale_setup)
    op.register_fake(recorded(lambda x, n=2: torch.zeros_like(x)))


def _many_formula(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count, ctx.n = len(inputs[0]), inputs[2]
        ctx.has_y = inputs[1] is not None

    def backward(ctx: Any, grads: Any) -> Any:
        needs = ctx.needs_input_grad
        assert len(needs[0]) == ctx.count
        return [grad * ctx.n for grad in grads], grads[0] * 3 if needs[1] else None, None

    op.register_autograd(backward, setup_context=setup)
    op.register_fake(recorded(lambda xs, y=None, n=2: [torch.zeros_like(x) for x in xs]))


def _autocast(op: Any) -> None:
    op.register_autocast("cpu", BF16)


def _vmap(op: Any) -> None:
    _with_formula(op)
    op.register_vmap(lambda info, in_dims, x, n=2: (x * n, in_dims[0]))


TWINS: dict[str, Callable[[], Twin]] = {
    "scale": lambda: Twin(scale),
    "scale_formula": lambda: Twin(scale, setup=_with_formula),
    "scale_autocast": lambda: Twin(scale, setup=_autocast),
    "scale_vmap": lambda: Twin(scale, setup=_vmap),
    "scale_cpu": lambda: Twin(scale, device_types="cpu"),
    "many": lambda: Twin(many),
    "many_formula": lambda: Twin(many, setup=_many_formula),
    "bump": lambda: Twin(bump, mutates_args={"x"}),
    "bump_autocast": lambda: Twin(bump, mutates_args={"x"}, setup=_autocast),
    "makes": lambda: Twin(makes),
    "modes_inside": lambda: Twin(modes_inside),
}
_defined: dict[str, Twin] = {}


def defined(name: str) -> Twin:
    if name not in _defined:
        _defined[name] = TWINS[name]()
    return _defined[name]


def t(**options: Any) -> Tensor:
    return torch.ones(2, 2, **options)


class LogFunctions(TorchFunctionMode):
    """Logs every function that it sees."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.log: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Log and call."""
        self.log.append(
            (str(func), type(func).__mro__[-2].__name__, len(args), sorted(kwargs or {}))
        )
        return func(*args, **(kwargs or {}))


class LogDispatches(TorchDispatchMode):
    """Logs every operator that it sees."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.log: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Log and call."""
        self.log.append((str(func), list(args), dict(kwargs or {}), [k.__name__ for k in types]))
        return func(*args, **(kwargs or {}))


class Replace(TorchDispatchMode):
    """Answers instead of the operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Return something else for the ops under test."""
        if func.namespace.startswith("twin"):
            return torch.full((3,), 9.0)
        return func(*args, **(kwargs or {}))


class FunctionSub(Tensor):
    """A subclass with `__torch_function__`."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Note the function, then do the default."""
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class PlainSub(Tensor):
    """A subclass with nothing of its own."""


class DisabledSub(Tensor):
    """A subclass that opts out of `__torch_function__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class WrapperSub(Tensor):
    """A subclass with `__torch_dispatch__` around another tensor."""

    @staticmethod
    def __new__(cls, inner):
        """Wrap."""
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        """Keep the inner tensor."""
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Unwrap, call, wrap."""
        unwrap = lambda v: v.inner if isinstance(v, cls) else v  # noqa: E731
        flat = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        result = func(*flat[0], **flat[1])
        return torch.utils._pytree.tree_map(
            lambda v: cls(v) if isinstance(v, Tensor) else v, result
        )


class NotATensor:
    """No tensor, but with `__torch_function__`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Answer instead of the function."""
        return ("seen", str(func), [k.__name__ for k in types], len(args))


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return t()


def wrapper_with_grad() -> Tensor:
    return WrapperSub(t()).requires_grad_()


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


TENSORS: dict[str, Callable[[], Any]] = {
    "plain": t,
    "leaf": lambda: t(requires_grad=True),
    "non_leaf": lambda: t(requires_grad=True) * 1,
    "view_of_leaf": lambda: t(requires_grad=True)[0:1],
    "view": lambda: t()[0:1],
    "integer": lambda: torch.ones(2, 2, dtype=torch.int64),
    "double": lambda: t(dtype=torch.float64),
    "half_grad": lambda: t(dtype=torch.float16, requires_grad=True),
    "complex_grad": lambda: t(dtype=torch.complex64, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(t()),
    "parameter_frozen": lambda: torch.nn.Parameter(t(), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(t()),
    "conj": lambda: t(dtype=torch.complex64).conj(),
    "neg": lambda: t(dtype=torch.complex64).conj().imag,
    "conj_grad": lambda: t(dtype=torch.complex64, requires_grad=True).conj(),
    "zero": lambda: torch._efficientzerotensor((2, 2)),
    "sparse": lambda: t().to_sparse(),
    "sparse_grad": lambda: t().to_sparse().requires_grad_(),
    "sparse_csr": lambda: t().to_sparse_csr(),
    "meta": lambda: t(device="meta"),
    "meta_grad": lambda: t(device="meta", requires_grad=True),
    "mkldnn": lambda: t().to_mkldnn(),
    "nested": nested,
    "inference": inference_tensor,
    "function_sub": lambda: t().as_subclass(FunctionSub),
    "plain_sub": lambda: t().as_subclass(PlainSub),
    "plain_sub_grad": lambda: t().as_subclass(PlainSub).requires_grad_(),
    "disabled_sub": lambda: t().as_subclass(DisabledSub),
    "wrapper_sub": lambda: WrapperSub(t()),
    "wrapper_sub_grad": wrapper_with_grad,
    "parameter_of_sub": lambda: torch.nn.Parameter(WrapperSub(t())),
    "not_a_tensor": NotATensor,
    "zero_dim": lambda: torch.tensor(2.0),
    "empty": lambda: torch.empty(0, 2),
    "deleted_grad": lambda: t(requires_grad=True).detach(),
    "hooked": lambda: (lambda v: (v.register_hook(lambda g: g * 5), v)[1])(t(requires_grad=True)),
    "with_attributes": lambda: (lambda v: (setattr(v, "mark", 1), v)[1])(t()),
    "shared_memory": lambda: t().share_memory_(),
    "from_numpy": lambda: torch.from_numpy(t().numpy()),
}


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def saved_tensors_hooks() -> Iterator[Any]:
    class Held:
        log: list[Any] = []  # noqa: RUF012

    held = Held()
    held.log = []

    def pack(x: Tensor) -> Tensor:
        held.log.append("pack")
        return x * 1

    def unpack(x: Tensor) -> Tensor:
        held.log.append("unpack")
        return x * 10

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield held


@contextmanager
def stacked() -> Iterator[LogFunctions]:
    with torch.inference_mode(), torch.enable_grad(), LogFunctions() as mode, LogDispatches():
        yield mode


@contextmanager
def left_inference() -> Iterator[None]:
    with torch.inference_mode(), torch.inference_mode(False):
        yield


@contextmanager
def excluded(key: str) -> Iterator[None]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield


@contextmanager
def multithreading_off() -> Iterator[None]:
    with torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def autocast_cache_off() -> Iterator[None]:
    with torch.autocast("cpu", BF16, cache_enabled=False):
        yield


CONTEXTS: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "left_inference": left_inference,
    "set_grad": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", BF16),
    "autocast_half": lambda: torch.autocast("cpu", torch.float16),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
    "autocast_cache_off": autocast_cache_off,
    "device_cpu": lambda: torch.device("cpu"),
    "device_meta": lambda: torch.device("meta"),
    "default_device_meta": lambda: default_device("meta"),
    "default_device_cpu": lambda: default_device("cpu"),
    "functions": LogFunctions,
    "dispatches": LogDispatches,
    "replace": Replace,
    "stacked": stacked,
    "no_functions": torch._C.DisableTorchFunction,
    "no_subclass_functions": torch._C.DisableTorchFunctionSubclass,
    "below_autograd": torch._C._AutoDispatchBelowAutograd,
    "no_python_dispatch": torch._C._DisableTorchDispatch,
    "excluded_autograd_cpu": lambda: excluded("AutogradCPU"),
    "excluded_inplace": lambda: excluded("ADInplaceOrView"),
    "excluded_backend": lambda: excluded("CPU"),
    "saved_tensors_hooks": saved_tensors_hooks,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "view_tracking": lambda: torch.autograd._force_original_view_tracking(True),
    "multithreading_off": multithreading_off,
}


# PyTorch itself crashes on tensors without memory of their own where their layer is switched off.
BARE = {"no_python_dispatch", "excluded_autograd_cpu", "excluded_inplace", "excluded_backend"}
WITHOUT_MEMORY = {"wrapper_sub", "wrapper_sub_grad", "parameter_of_sub", "nested"}


def check(twin: Twin, make: Callable[[], Arguments], context: Callable, **options: Any) -> None:
    for how in HOWS:
        FunctionSub.seen.clear()
        twin.compare(make, context, how, **options)
        names = [
            name.replace("twin_torch", "").replace("twin_hotop", "") for name in FunctionSub.seen
        ]
        half = len(names) // 2
        assert names[:half] == names[half:], "the subclass saw other functions"
