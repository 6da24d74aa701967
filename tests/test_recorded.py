"""Calls that autograd records are direct: one frame less, PyTorch's own node; the odd corners."""

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hotop
from hotop import _core

NAMES = iter(f"recorded::op_{n}" for n in range(1000))


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


def square(kernel: Callable[[Tensor], Tensor] | None = None) -> Any:
    op = hotop.custom_op(
        next(NAMES), kernel or (lambda x: x * x), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_autograd(
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return op


def test_the_first_call_is_direct_too() -> None:
    op, x = square(), leaf()
    y = op(x)
    assert op._plan.direct_calls == 1
    assert y.grad_fn.name() == f"GeneratedBackwardFor_recorded_{op._name}_defaultBackward"
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0]))


def test_no_python_frame_stands_between() -> None:
    frames = []

    def kernel(x: Tensor) -> Tensor:
        frames.append(sys._getframe(1).f_code.co_name)
        return x * x

    square(kernel)(leaf())
    assert frames == ["test_no_python_frame_stands_between"]


def test_double_backward_through_another_op() -> None:
    cube = hotop.custom_op(
        next(NAMES), lambda x: x**3, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    inner = square()
    cube.register_autograd(
        lambda ctx, grad: 3 * grad * inner(ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    assert torch.autograd.gradgradcheck(cube, leaf().double().detach().requires_grad_())


def test_formula_with_keyword_only_and_default_inputs() -> None:
    seen = []
    op = hotop.custom_op(
        next(NAMES),
        lambda x, n=2, *, scale=1.5, sizes=(): x * n * scale,
        mutates_args=(),
        schema="(Tensor x, int n=2, *, float scale=1.5, int[] sizes=[3]) -> Tensor",
    )

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        seen.append((inputs[1:], keyword_only_inputs))
        keyword_only_inputs["sizes"].append(9)

    op.register_autograd(lambda ctx, grad: grad, setup_context=setup_context)
    op(leaf())
    op(leaf(), 3, scale=2.0, sizes=[1])
    op(leaf(), 2)
    # A list of a default is made anew.
    assert seen == [
        ((2,), {"scale": 1.5, "sizes": [3, 9]}),
        ((3,), {"scale": 2.0, "sizes": [1, 9]}),
        ((2,), {"scale": 1.5, "sizes": [3, 9]}),
    ]


def test_ops_called_by_setup_context_and_kernel() -> None:
    inner = square()
    outer = hotop.custom_op(
        next(NAMES), lambda x: inner(x) + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        assert not torch.is_grad_enabled()
        ctx.other = inner(inputs[0])
        ctx.save_for_backward(inputs[0])

    outer.register_autograd(
        lambda ctx, grad: grad * ctx.other * ctx.saved_tensors[0], setup_context=setup_context
    )
    x = leaf()
    outer(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 8.0]))
    assert torch.is_grad_enabled()


def test_finalizer_that_calls_an_op_before_the_forward() -> None:
    """The node is made before the forward, and making it can run the garbage collector."""
    op, results = square(), []

    class Calls:
        def __del__(self) -> None:
            results.append(op(leaf(3.0)))

    for _ in range(300):
        cycle: list[Any] = [Calls()]
        cycle.append(cycle)
        del cycle
        y = op(leaf())
        assert torch.equal(y.detach(), torch.tensor([1.0, 4.0]))
    gc.collect()
    assert len(results) == 300
    assert all(float(result) == 9.0 for result in results)


@pytest.mark.parametrize("where", ["kernel", "setup"])
def test_errors_leave_nothing_behind(where: str) -> None:
    def kernel(x: Tensor) -> Tensor:
        if where == "kernel" and len(x) == 3:
            raise ValueError("three")
        return x * x

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        if where == "setup" and len(inputs[0]) == 3:
            raise ValueError("three")

    op = hotop.custom_op(next(NAMES), kernel, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(lambda ctx, grad: grad, setup_context=setup_context)
    for _ in range(3):
        with pytest.raises(ValueError, match="three"):
            op(leaf(1.0, 2.0, 3.0))
        assert torch.is_grad_enabled()
        assert not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU)
        assert op(leaf()).grad_fn is not None


def test_nothing_is_kept() -> None:
    op, x = square(), leaf()
    op(x).sum().backward()
    y = op(x)
    reference = weakref.ref(y)
    before = sys.getrefcount(x)
    del y
    gc.collect()
    assert reference() is None
    for _ in range(50):
        op(x)
    gc.collect()
    assert sys.getrefcount(x) <= before


def test_mutable_and_list_ops_are_recorded_directly() -> None:
    lists = hotop.custom_op(
        next(NAMES), lambda xs: xs[0] * 2, mutates_args=(), schema="(Tensor[] xs) -> Tensor"
    )
    lists.register_autograd(lambda ctx, grad: [2 * grad])
    x = leaf()
    lists([x]).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    assert lists._plan.direct_calls == 1
    modes = []

    @hotop.custom_op(next(NAMES), mutates_args={"out"})
    def fill(out: Tensor, x: Tensor) -> None:
        modes.append(torch.is_grad_enabled())
        out.copy_(x)

    out = torch.zeros(2)
    fill(out, x)
    assert torch.equal(out, torch.tensor([1.0, 2.0]))
    assert out._version == 2
    assert not out.requires_grad
    assert modes == [False]
    assert fill._plan.direct_calls == 1


def several_lists() -> Any:
    def kernel(xs: list[Tensor], w: Tensor, ys: list[Tensor | None]) -> list[Tensor]:
        return [x * w for x in xs]

    op = hotop.custom_op(
        next(NAMES),
        kernel,
        mutates_args=(),
        schema="(Tensor[] xs, Tensor w, Tensor?[] ys) -> Tensor[]",
    )
    return op


def test_lists_as_the_formula_sees_them() -> None:
    seen: list[Any] = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        xs, w, _ = inputs
        xs.append("not an input any more")
        ctx.save_for_backward(*xs[:2], w)

    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        first, second, w = ctx.saved_tensors
        seen.append((ctx.needs_input_grad, len(grads)))
        return [grads[0] * w, None], grads[0] * first + grads[1] * second, None

    op = several_lists()
    op.register_autograd(backward, setup_context=setup_context)
    a, b, w = leaf(), leaf().detach(), leaf()
    out = op([a, b], w, [None, b])
    assert len(out) == 2
    (out[0].sum() + out[1].sum()).backward()
    assert seen == [(([True, False], True, False), 2)]
    assert torch.equal(a.grad, w)
    assert torch.equal(w.grad, a + b)
    op.register_autograd(lambda ctx, grads: (grads, None, [None, None]))
    op([a], w, [b, b])[0].sum().backward()
    op.register_autograd(lambda ctx, grads: (grads[0], None, None))
    with pytest.raises(RuntimeError, match="the same structure as the inputs"):
        op([a], w, [None])[0].sum().backward()
    op.register_autograd(lambda ctx, grads: (grads * 2, None, None))
    with pytest.raises(RuntimeError, match="the same structure as the inputs"):
        op([a], w, [None])[0].sum().backward()


def test_output_list_spoiled_by_setup_context() -> None:
    op = several_lists()
    op.register_autograd(
        lambda ctx, grads: (grads, None, [None]),
        setup_context=lambda ctx, inputs, output: output.append("no Tensor"),
    )
    with pytest.raises(RuntimeError, match=r"Expected a value of type|Unable to cast"):
        op([leaf()], leaf(), [None])


def test_pytorch_backward_reads_the_lists_of_a_direct_call() -> None:
    """PyTorch's own method is what compiled autograd traces."""
    op = several_lists()
    op.register_autograd(lambda ctx, grads: (grads, None, [None]))
    a, w = leaf(), leaf()
    node = op([a, a], w, [w])[0].grad_fn
    inherited = type(node).__mro__[1]
    one = torch.ones(2)
    assert inherited.apply(node, one, one)[:4] == (one, one, None, None)


def test_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    op, x = square(), leaf()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        op(op(x)).sum().backward()
    assert torch.equal(x.grad, torch.tensor([4.0, 32.0]))


def test_what_a_node_shows() -> None:
    op = square()
    x, y = leaf(), torch.ones(2)
    node = op(x).grad_fn
    assert isinstance(node, torch.autograd.function.BackwardCFunction)
    assert node.next_functions[0][0].variable is x
    assert node.saved_tensors[0] is x
    node.note = 3
    assert node.note == 3
    assert op(y).grad_fn is None
    with torch.no_grad():
        assert op(x).grad_fn is None


def test_ctx_methods_named_by_inspect() -> None:
    import inspect

    method = type(square()(leaf()).grad_fn).save_for_backward
    assert list(inspect.signature(method).parameters) == ["self", "tensors"]


def test_only_node_classes_are_taken() -> None:
    op = square()
    op(leaf())
    with pytest.raises(TypeError, match="class of autograd nodes"):
        _core.add_node_methods(int)
    with pytest.raises(TypeError, match="class of autograd nodes"):
        op._plan.set_formula(int, None, None)


def test_thirty_inputs() -> None:
    """Thirty inputs: every gradient arrives at its own place."""
    names = [f"x{i}" for i in range(30)]
    op = hotop.custom_op(
        next(NAMES),
        lambda *xs: torch.stack(xs).sum(0),
        mutates_args=(),
        schema=f"({', '.join('Tensor ' + n for n in names)}) -> Tensor",
    )
    op.register_autograd(lambda ctx, grad: tuple(grad * i for i in range(30)))
    xs = [leaf() if i % 3 else torch.ones(2) for i in range(30)]
    op(*xs).sum().backward()
    for i, x in enumerate(xs):
        assert x.grad is None if i % 3 == 0 else torch.equal(x.grad, torch.full((2,), float(i)))


def test_checkpoint_hooks_and_anomaly_mode() -> None:
    from torch.utils.checkpoint import checkpoint

    op, x = square(), leaf()
    checkpoint(lambda t: op(op(t)), x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, torch.tensor([4.0, 32.0]))
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with hooks, torch.autograd.detect_anomaly(check_nan=False):
        op(leaf()).sum().backward()
    assert len(packed) == 1


def test_ctrl_c_while_the_classes_of_a_formula_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made in Python by the first call that needs them; that call ends, the next works."""
    from hotop import _planned_op

    @hotop.custom_op("recorded::interrupted", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    op.register_autograd(lambda ctx, grad: grad * 2)
    x = torch.ones(2, requires_grad=True)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_planned_op, "generated_function", interrupt)
        with pytest.raises(KeyboardInterrupt):
            op(x)
    op(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    assert hotop.explain(op, x).direct
