"""Functorch, forward mode, tracing, Dynamo, threads, nesting and errors, twin against twin."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from twin import HOWS, Twin, needs_hotop
from twin_contexts import BF16, CONTEXTS, TENSORS, check, defined, t


@pytest.mark.parametrize("op_name", ["scale", "scale_formula", "scale_vmap", "bump", "makes"])
@pytest.mark.parametrize(
    "transform",
    ["vmap", "vmap_in_vmap", "grad", "vjp", "functionalize", "vmap_grad", "jacrev", "vmap_chunk"],
)
@pytest.mark.filterwarnings("ignore")
def test_functorch(op_name: str, transform: str) -> None:
    func = torch.func
    summed = lambda call: lambda x: call(x).sum()  # noqa: E731
    transforms: dict[str, Callable[[Callable], Callable]] = {
        "vmap": torch.vmap,
        "vmap_in_vmap": lambda call: torch.vmap(torch.vmap(call)),
        "grad": lambda call: func.grad(summed(call)),
        "vjp": lambda call: lambda x: func.vjp(call, x)[1](torch.ones_like(x)),
        "functionalize": func.functionalize,
        "vmap_grad": lambda call: torch.vmap(func.grad(summed(call))),
        "jacrev": func.jacrev,
        "vmap_chunk": lambda call: torch.vmap(call, in_dims=1, chunk_size=1),
    }
    for kind in ("plain", "leaf", "parameter"):
        for context in ("none", "no_grad", "functions"):
            check(
                defined(op_name),
                lambda k=kind: ((TENSORS[k](),), {}),
                CONTEXTS[context],
                transform=transforms[transform],
            )


def test_calls_below_functorch_do_not_see_it() -> None:
    # The argument is an ordinary tensor, while a transform is active.
    def beside(call: Callable) -> Callable:
        return torch.vmap(lambda x: x + call(t()))

    for name in ("scale", "scale_formula", "scale_vmap"):
        check(defined(name), lambda: ((t(),), {}), nullcontext, transform=beside)


@needs_hotop
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("op_name", ["scale", "scale_formula", "bump"])
def test_forward_mode_never_drops_a_tangent(op_name: str, grad: bool) -> None:
    # PyTorch drops it silently: the allowed difference is that hotop raises.
    import torch.autograd.forward_ad as forward_ad

    for op in defined(op_name).ops[1:]:
        with forward_ad.dual_level():
            x = t(requires_grad=grad)
            dual = forward_ad.make_dual(x * 1 if op_name == "bump" else x, t())
            with pytest.raises((RuntimeError, NotImplementedError)):
                op(dual)
            assert torch.equal(op(t()), t() * (4 if op_name == "bump" else 2))
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.func.jvp(op, (t(),), (t(),))
    for context in (forward_ad.dual_level, torch.no_grad):
        check(defined(op_name), lambda: ((t(),), {}), context)


def _traced(call: Callable) -> Callable:
    def run(x: Tensor) -> Any:
        traced = torch.jit.trace(lambda y: call(y) + 1, (x,), check_trace=False)
        return traced(x), str(traced.graph).split("#")[0]

    return run


def _symbolic(call: Callable) -> Callable:
    def run(x: Tensor) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(lambda y: call(y) + 1)(x)
        targets = [str(node.target) for node in graph.graph.nodes]
        return graph(x), targets, graph.code

    return run


def _fx(call: Callable) -> Callable:
    def run(x: Tensor) -> Any:
        graph = torch.fx.symbolic_trace(lambda y: call(y) + 1)
        return graph(x), [str(node.op) for node in graph.graph.nodes]

    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", [_traced, _symbolic, _fx])
@pytest.mark.parametrize("op_name", ["scale", "scale_formula", "bump"])
def test_tracing(op_name: str, transform: Callable) -> None:
    for kind in ("plain", "leaf"):
        if (kind, op_name) == ("leaf", "bump"):
            continue
        check(
            defined(op_name), lambda k=kind: ((TENSORS[k](),), {}), nullcontext, transform=transform
        )


def test_under_an_active_dynamo_callback() -> None:
    # The kernel is never traced: not behind a graph break, not below disable(recursive=False).
    def watched(x: Tensor) -> Tensor:
        helper.append(torch.compiler.is_compiling())
        return x * 2

    helper: list[bool] = []
    twin = Twin(watched, setup=lambda op: op.register_fake(torch.empty_like), record=False)
    frames = []
    for op in twin.ops:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()

        @torch.compile(backend=counter)
        def broken(x: Tensor, op: Any = op) -> Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return op(y)

        @torch._dynamo.disable(recursive=False)
        def inner(x: Tensor, op: Any = op) -> Tensor:
            return op(x)

        @torch.compile(backend=counter)
        def outer(x: Tensor, inner: Any = inner) -> Tensor:
            return inner(x) + 1

        assert torch.equal(broken(t()), t() * 4)
        assert torch.equal(outer(t()), t() * 3)
        frames.append((counter.frame_count, counter.op_count, list(helper)))
        helper.clear()
    torch._dynamo.reset()
    assert frames[0] == frames[1]
    assert not any(frames[1][2])


def test_threads_have_their_own_modes() -> None:
    modes = [torch.no_grad, torch.inference_mode, nullcontext, lambda: torch.autocast("cpu", BF16)]

    def answers(op: Any) -> list[Any]:
        found: list[Any] = [None] * len(modes)
        barrier = threading.Barrier(len(modes))

        def work(index: int) -> None:
            barrier.wait()
            seen = set()
            for _ in range(50):
                with modes[index]():
                    y = op(t(requires_grad=True))
                    seen.add((y.requires_grad, y.is_inference(), str(y.dtype)))
                    try:
                        op("x")
                    except RuntimeError as error:
                        seen.add(str(error)[12:40])
            found[index] = sorted(map(str, seen))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(modes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    for name in ("scale", "scale_formula", "scale_autocast"):
        left, right = defined(name).each(answers)
        assert left == right


def test_nested_calls_and_recursion() -> None:
    twins: list[Twin] = []

    def outer(x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            return x + 1
        op = twins[0].ops[_side[0]]
        return op(x.detach() * 1, depth - 1) * 2

    _side = [0]
    twins.append(Twin(outer, setup=lambda op: op.register_autograd(lambda ctx, g: (g, None))))
    for grad in (False, True):
        for context in ("none", "no_grad", "inference_mode", "functions", "autocast"):
            seen = []
            for _side[0] in (0, 1):
                op = twins[0].ops[_side[0]]
                with CONTEXTS[context]():
                    y = op(t(requires_grad=grad), 4)
                seen.append(
                    (y.tolist(), y.requires_grad, y._version if not y.is_inference() else 0)
                )
            assert seen[0] == seen[1]


def test_recursion_without_end_is_an_error() -> None:
    ops: list[Any] = []

    def endless(x: Tensor) -> Tensor:
        return ops[-1](x)

    twin = Twin(endless, record=False)
    for op in twin.ops:
        ops[:] = [op]
        with pytest.raises((RecursionError, RuntimeError)):
            op(t())
        assert torch.is_grad_enabled()
        assert str(torch._C._dispatch_tls_local_exclude_set()).count("AutogradCPU") == 0


def test_kernel_that_changes_modes_for_good() -> None:
    def leaks(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x + 1

    twin = Twin(leaks)
    for kind in ("plain", "leaf"):
        for how in HOWS:
            try:
                twin.compare(lambda k=kind: ((TENSORS[k](),), {}), torch.enable_grad, how)
            finally:
                torch.set_grad_enabled(True)


@pytest.mark.parametrize(
    "error",
    [ValueError("v"), KeyboardInterrupt(), SystemExit(3), StopIteration(1), GeneratorExit()],
)
def test_kernel_errors_in_contexts(error: BaseException) -> None:
    def raises(x: Tensor) -> Tensor:
        raise type(error)(*error.args)

    twin = Twin(raises)
    for kind in ("plain", "leaf", "plain_sub", "meta"):
        for context in ("none", "no_grad", "inference_mode", "functions", "autocast", "anomaly"):
            check(twin, lambda k=kind: ((TENSORS[k](),), {}), CONTEXTS[context])
