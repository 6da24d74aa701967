"""Recorded calls under attack: the same program through either library; crashes in a process."""

import gc
import itertools
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hotop

NAMES = itertools.count()
ONE = "(Tensor x) -> Tensor"
Make = Callable[..., Any]


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


def maker(factory: Callable[..., Any]) -> Make:
    def make(
        kernel: Any, schema: str, backward: Any = None, setup: Any = None, mutates: Any = ()
    ) -> Any:
        name = f"attack::op_{next(NAMES)}"
        op = factory(name, kernel, mutates_args=mutates, schema=schema)
        if backward is not None:
            op.register_autograd(backward, setup_context=setup)
        return op

    return make


def both(program: Callable[[Make], Any]) -> Any:
    """Return what the program makes of either library's op, after comparing."""
    shown = []
    for factory in (torch.library.custom_op, hotop.custom_op):
        try:
            result = program(maker(factory))
        except Exception as error:
            result = (type(error).__name__, str(error))
        shown.append(re.sub(r"0x[0-9a-f]+", "0x", re.sub(r"op_\d+", "op", repr(result))))
    assert shown[0] == shown[1]
    return result


def survives(program: str) -> None:
    """Run a program where freed memory is filled, so that its use shows."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PREAMBLE) + textwrap.dedent(program)],
        env={**os.environ, "MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert done.stdout.endswith("end\n"), done.stdout[-2000:]


PREAMBLE = """
    import gc
    import torch, hotop
    def leaf():
        return torch.tensor((1.0, 2.0), requires_grad=True)
    def make(kernel, schema, backward, setup=None):
        op = hotop.custom_op("attack::op", kernel, mutates_args=(), schema=schema)
        op.register_autograd(backward, setup_context=setup)
        return op
    """


def test_dirty_tensors_that_nobody_else_holds() -> None:
    """Their versions are bumped while ctx still holds them, not after it let them go."""
    survives(
        """
        def setup_context(ctx, inputs, output):
            ctx.mark_dirty(*[torch.empty(3) for _ in range(40)])
        op = make(lambda x: x * 2, "(Tensor x) -> Tensor", lambda ctx, g: g, setup_context)
        for _ in range(300):
            try:
                op(leaf())
            except RuntimeError as error:
                assert "marked as dirty" in str(error)
            else:
                raise AssertionError("no error")
        print("end")
        """
    )


@pytest.mark.parametrize(
    "structure",
    ["(5, 6)", "(None, None)", "((None,), (None,))", "((2**70,), (1,))", "(('a',), ('b',))"],
)
def test_structure_replaced_by_something_alike(structure: str) -> None:
    survives(
        f"""
        op = make(
            lambda xs: [x * 2 for x in xs], "(Tensor[] xs) -> Tensor[]",
            lambda ctx, grads: [g * 2 for g in grads],
        )
        y = op([leaf()])[0]
        y.grad_fn._pt_metadata = {structure}
        try:
            y.sum().backward()
        except AttributeError as error:
            assert "output_spec" in str(error) or "input_spec" in str(error), error
        else:
            raise AssertionError("no error")
        print("end")
        """
    )


def test_finalizer_that_empties_the_gradients_list() -> None:
    """Until CPython 3.12 the collector runs while the result of the formula is taken apart."""
    survives(
        """
        kept = []
        class Empties:
            def __init__(self):
                self.cycle = self
            def __del__(self):
                for grads in kept:
                    grads.clear()
                kept.clear()
        def backward(ctx, grads):
            result = [torch.full((2,), 3.0) for _ in grads]
            kept.append(result)
            gc.disable()
            Empties()
            gc.enable()
            gc.set_threshold(1)
            return result
        op = make(lambda xs: [x * 2 for x in xs], "(Tensor[] xs) -> Tensor[]", backward)
        for _ in range(100):
            xs = [leaf() for _ in range(40)]
            try:
                sum(y.sum() for y in op(xs)).backward()
            except RuntimeError as error:
                assert "same structure" in str(error)
            else:
                assert all(torch.equal(x.grad, torch.full((2,), 3.0)) for x in xs)
            finally:
                gc.set_threshold(700, 10, 10)
        print("end")
        """
    )


def test_finalizer_that_registers_a_kernel_before_the_forward() -> None:
    """Registering forgets the routes; the call under way keeps what it knew of its own."""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return x * 2

    def program(make: Make) -> Any:
        versions = set()
        for i in range(60):
            if i % 10 == 0:
                op = make(kernel, "(Tensor x, Tensor(a!) y) -> Tensor", mutates=("y",))
                op(leaf(), torch.ones(2))
                devices = iter(["cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu"])

            class Registers:
                def __init__(self) -> None:
                    self.cycle = self

                def __del__(self, op: Any = op, devices: Any = devices) -> None:
                    for device in itertools.islice(devices, 1):
                        op.register_kernel(device, kernel)

            x, y = leaf(), torch.ones(2)
            gc.collect()
            gc.disable()
            Registers()
            gc.enable()
            gc.set_threshold(1 + i % 9)
            try:
                op(x, y)
            finally:
                gc.set_threshold(700, 10, 10)
            versions.add(y._version)
        return versions

    assert both(program) == {2}


@pytest.mark.parametrize("default", [False, True])
def test_setup_context_and_hooks_run_without_the_device_mode(default: bool) -> None:
    def program(make: Make) -> Any:
        seen = []

        def kernel(x: Tensor) -> Tensor:
            seen.append(torch.zeros(1).device.type)
            return x * 2

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            seen.append(torch.zeros(1).device.type)
            ctx.save_for_backward(*inputs)

        def pack(tensor: Tensor) -> Tensor:
            seen.append(torch.zeros(1).device.type)
            return tensor

        op = make(kernel, ONE, lambda ctx, grad: grad, setup_context)
        x = leaf()
        if default:
            torch.set_default_device("meta")
        try:
            with (
                torch.device("meta"),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed),
            ):
                op(x)
        finally:
            torch.set_default_device(None)
        return seen

    assert both(program) == ["cpu"] * 3


def test_negative_zero_reaches_setup_context_as_the_default() -> None:
    def program(make: Make) -> Any:
        seen: list[Any] = []

        def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
            seen.append((inputs[1:], keyword_only_inputs))

        op = make(
            lambda x, s=0.0, *, k=0.0: x * 2,
            "(Tensor x, float s=0.0, *, float k=0.0) -> Tensor",
            lambda ctx, grad: (grad, None),
            setup_context,
        )
        op(leaf(), -0.0)
        op(leaf(), -0.0, k=-0.0)
        return seen

    both(program)


@pytest.mark.parametrize("place", [0, 1])
def test_input_appended_to_an_output_list(place: int) -> None:
    """An input comes back as a view; the caller's own Tensor gets no history."""

    def program(make: Make) -> Any:
        op = make(
            lambda x, w: [x * 2],
            "(Tensor x, Tensor w) -> Tensor[]",
            lambda ctx, grads: (grads[0] * 2, None),
            lambda ctx, inputs, output: output.append(inputs[place]),
        )
        given = (leaf(), torch.ones(2))
        result = op(*given)
        other = result[1]
        return [t.requires_grad for t in (*given, *result)], other is given[place], other._is_view()

    assert both(program) == ([True, False, True, True], False, True)


def test_marked_dirty_twice() -> None:
    def program(make: Make) -> Any:
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_dirty(output, output)

        with pytest.warns(UserWarning, match="not an input"):
            return make(lambda x: x * 2, ONE, lambda ctx, g: g, setup_context)(leaf())._version

    assert both(program) == 2


def test_kernel_that_replaces_the_formula() -> None:
    """The setup_context that runs is the one registered after the kernel ran."""

    def program(make: Make) -> Any:
        seen: list[str] = []

        def replaces(x: Tensor) -> Tensor:
            op.register_autograd(
                lambda ctx, grad: grad * 9, setup_context=lambda **_: seen.append("new")
            )
            return x * 2

        op = make(replaces, ONE, lambda ctx, g: g, lambda **_: seen.append("old"))
        x = leaf()
        op(x).sum().backward()
        return seen, x.grad

    both(program)


def test_flags_of_the_wrong_length_with_lists() -> None:
    def program(make: Make) -> Any:
        results = []
        for flags in ((True,), (True, False, False), (True, False, False, False)):
            op = make(
                lambda xs: [x * 2 for x in xs],
                "(Tensor[] xs) -> Tensor[]",
                lambda ctx, grads: [g * 2 for g in grads],
                lambda ctx, inputs, output, flags=flags: setattr(ctx, "needs_input_grad", flags),
            )
            try:
                op([leaf()])[0].sum().backward()
                results.append("passes")
            except ValueError as error:
                results.append(str(error))
        return results

    both(program)


def test_backward_of_one_node_within_itself() -> None:
    def program(make: Make) -> Any:
        flags: list[Any] = []
        kept: dict[str, Tensor] = {}

        def backward(ctx: Any, grad: Tensor) -> Tensor:
            flags.append(ctx.needs_input_grad)
            if len(flags) == 1:
                torch.autograd.grad(kept["y"], kept["x"], torch.ones(2), retain_graph=True)
            return grad * 2

        op = make(lambda x: x * 2, ONE, backward)
        x = leaf()
        y = op(x)
        kept.update(x=x, y=y)
        y.backward(torch.ones(2), retain_graph=True)
        kept.clear()
        return flags, y.grad_fn.needs_input_grad, x.grad

    both(program)


def test_pack_hooks_that_read_ctx_and_call_the_op() -> None:
    def program(make: Make) -> Any:
        contexts: list[Any] = []
        seen: list[Any] = []

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            contexts.append(ctx)
            ctx.save_for_backward(inputs[0], output, inputs[0] * 1)

        op = make(lambda x: x * x, ONE, lambda ctx, g: 2 * g * ctx.saved_tensors[0], setup_context)

        def pack(tensor: Tensor) -> Tensor:
            seen.append((len(contexts[-1].saved_tensors), tensor.is_leaf))
            if len(seen) < 3:
                op(leaf())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            x = leaf()
            y = op(x)
        y.sum().backward()
        contexts.clear()
        return seen, x.grad

    both(program)


def test_first_calls_of_several_threads() -> None:
    make = maker(hotop.custom_op)
    for _ in range(10):
        op = make(
            lambda x: x * x,
            ONE,
            lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
            lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        start, grads = threading.Barrier(4), []

        def run(op: Any = op, start: Any = start, grads: Any = grads) -> None:
            start.wait()
            x = leaf()
            op(x).sum().backward()
            grads.append(x.grad.tolist())

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert grads == [[2.0, 4.0]] * 4
