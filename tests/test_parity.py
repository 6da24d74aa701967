"""The thirteen parity checks of the original helper: the old op against the new, one test each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses import FakeTensorMode

import hotop

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def old(name: str, fn: Callable, *, mutates_args: Any = (), device: str = "cpu") -> Any:
    return torch.library.custom_op(
        f"parity_old::{name}", fn, mutates_args=mutates_args, device_types=device
    )


def new(name: str, fn: Callable, *, mutates_args: Any = (), device: str = "cpu") -> Any:
    return hotop.custom_op(
        f"parity_new::{name}", fn, mutates_args=mutates_args, device_types=device
    )


def fast(name: str, fn: Callable, *, mutates_args: Any = (), device: str = "cpu") -> Any:
    return hotop.fast_custom_op(
        f"parity_fast::{name}", mutates_args=mutates_args, device_types=device.upper()
    )(fn)


@pytest.fixture(params=[new, fast], ids=["custom_op", "fast_custom_op"])
def make(request: pytest.FixtureRequest) -> Callable:
    """The new factory under test."""
    return request.param


def gemm(a: Tensor, b: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """A kernel like those of a serving engine: product, scale, bias."""
    out = (a @ b) * scale
    return out if bias is None else out + bias


def gemm_fake(a: Tensor, b: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def norm_(x: Tensor, out: Tensor, eps: float = 1e-5) -> None:
    out.copy_(x / (x.square().mean(-1, keepdim=True) + eps).sqrt())


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return make(4, 8), make(8, 3), make(3)


def text_of(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    text = str(caught.value)
    for name in ("parity_old", "parity_new", "parity_fast"):
        text = text.replace(name, "parity")
    return type(caught.value).__name__, text


def handles(op: Any) -> list[Callable]:
    overload = op._opoverload
    return [op, overload, overload._overloadpacket]


def test_01_numerics(make: Callable) -> None:
    ops = old("numerics", gemm), make("numerics", gemm)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a, b, bias = inputs(dtype)
        for args in ((a, b), (a, b, bias), (a, b, None, 0.5), (a, b, bias, 2)):
            expected = ops[0](*args)
            for call in handles(ops[1]):
                result = call(*args)
                assert torch.equal(result, expected)
                assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_02_compile_fullgraph(make: Callable, dynamic: bool) -> None:
    results = []
    for factory in (old, make):
        op = factory(f"compiled_{dynamic}", gemm)
        op.register_fake(gemm_fake)
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        def step(a: Tensor, b: Tensor, bias: Tensor, op: Any = op) -> Tensor:
            return op(a * 2, b, bias, scale=0.5).relu() + op(a, b)

        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=counter)
        outputs = []
        for rows in (4, 5, 6):
            a, b, bias = inputs()
            a = a.repeat(2, 1)[:rows]
            outputs.append(compiled(a, b, bias))
            assert torch.equal(outputs[-1], step(a, b, bias))
        targets = [
            str(node.target).partition(".")[2]
            for node in counter.graphs[0].graph.nodes
            if node.op == "call_function"
        ]
        results.append((counter.frame_count, counter.op_count, targets, outputs))
    torch._dynamo.reset()
    assert results[0][:3] == results[1][:3]
    assert results[1][2].count(f"compiled_{dynamic}.default") == 2
    assert all(torch.equal(*pair) for pair in zip(results[0][3], results[1][3], strict=True))


def test_03_fake_and_meta(make: Callable) -> None:
    seen = []
    for factory in (old, make):
        op = factory("faked", gemm)
        without = text_of(lambda op=op: op(*(t.to("meta") for t in inputs())))
        op.register_fake(gemm_fake)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(t) for t in inputs()))
        meta = op(*(t.to("meta") for t in inputs()))
        seen.append(
            (without, type(fake).__name__, fake.shape, fake.device, meta.shape, meta.device)
        )
    assert seen[0] == seen[1]


def test_04_inference_mode_and_no_grad(make: Callable) -> None:
    ops = old("modes", gemm), make("modes", gemm)
    for mode in MODES:
        seen = []
        for op in ops:
            with mode():
                a, b, _ = inputs()
                plain, leaf = op(a, b), op(a, b.requires_grad_())
            seen.append([(t.is_inference(), t.requires_grad) for t in (plain, leaf)])
        assert seen[0] == seen[1]


def test_05_mutation_and_aliasing(make: Callable) -> None:
    ops = [factory("mutates", norm_, mutates_args=("out",)) for factory in (old, make)]
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            seen = []
            for op in ops:
                x, out = inputs()[0], torch.zeros(4, 8)
                view = out[1:]
                assert op(x, out) is None
                seen.append((out, out._version, x._version, view._version))
            assert torch.equal(seen[0][0], seen[1][0])
            assert seen[0][1:] == seen[1][1:]
            assert seen[1][1:] == (2, 0, 2)  # the op's own bump and the kernel's copy_

    def alias(x: Tensor) -> Tensor:
        return x.view(-1)

    texts = [text_of(lambda f=f: f("aliases", alias)(torch.ones(2, 2))) for f in (old, make)]
    assert texts[0][0] == texts[1][0] == "RuntimeError"
    assert texts[0][1] == texts[1][1]


def test_06_the_same_error_for_a_wrong_dtype(make: Callable) -> None:
    def strict(x: Tensor, n: int) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"strict: expected float32, got {x.dtype}")
        return x * n

    ops = old("dtype", strict), make("dtype", strict)
    calls = [
        (torch.ones(2, dtype=torch.int64), 1),
        (torch.ones(2), 1.5),
        (torch.ones(2), "1"),
        ([1.0], 1),
        (1.0, 1),
    ]
    for args in calls:
        for call_old, call_new in zip(*map(handles, ops), strict=True):
            expected = text_of(lambda c=call_old, a=args: c(*a))
            assert text_of(lambda c=call_new, a=args: c(*a)) == expected


def test_07_the_same_error_for_a_wrong_device(make: Callable) -> None:
    ops = old("device", gemm), make("device", gemm)
    a, b, bias = inputs()
    for args in ((a.to("meta"), b), (a, b.to("meta")), (a, b, bias.to("meta"))):
        texts = [text_of(lambda op=op, args=args: op(*args)) for op in ops]
        assert texts[0] == texts[1]


def test_08_a_cpu_tensor_on_an_op_that_has_only_a_cuda_kernel(make: Callable) -> None:
    ops = old("cuda_only", gemm, device="cuda"), make("cuda_only", gemm, device="cuda")
    for call_old, call_new in zip(*map(handles, ops), strict=True):
        expected = text_of(lambda c=call_old: c(*inputs()))
        assert expected[0] == "NotImplementedError"
        found = text_of(lambda c=call_new: c(*inputs()))
        assert found[0] == expected[0]
        # The rest of the text lists where the kernels of this op were registered.
        assert found[1].partition("\n")[0] == expected[1].partition("\n")[0]


def test_09_requires_grad_without_a_formula(make: Callable) -> None:
    ops = old("no_formula", gemm), make("no_formula", gemm)
    seen = []
    for op in ops:
        a, b, _ = inputs()
        out = op(a.requires_grad_(), b)
        assert out.requires_grad
        seen.append((out.detach(), text_of(lambda out=out: out.sum().backward()), a.grad))
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[0][1:] == seen[1][1:]
    assert "no autograd formula was registered" in seen[1][1][1]


def test_10_default_arguments_and_schema_string(make: Callable) -> None:
    def defaults(
        x: Tensor,
        i: int = 3,
        f: float = 0.1,
        b: bool = True,
        s: str = "silu",
        o: int | None = None,
        t: Tensor | None = None,
        d: torch.dtype = torch.bfloat16,
        dev: torch.device | None = None,
        *,
        k: int = 9,
        n: float | None = 2.5,
    ) -> tuple[Tensor, int]:
        seen.append((i, f, b, s, o, t, d, dev, k, n))
        return x + i, k

    seen: list[Any] = []
    ops = old("defaults", defaults), make("defaults", defaults)
    schemas = [str(op._opoverload._schema).partition("(")[2] for op in ops]
    assert schemas[0] == schemas[1]
    for args, kwargs in [
        ((), {}),
        ((3, 0.1), {}),
        ((4,), {"k": 1}),
        ((3, 0.1, True, "silu", None, None, torch.bfloat16, None), {"k": 9, "n": 2.5}),
        ((), {"dev": torch.device("cpu"), "n": None, "s": "gelu"}),
    ]:
        seen.clear()
        results = [op(torch.ones(1), *args, **kwargs) for op in ops]
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1] == results[1][1]
        assert seen[0] == seen[1]


def test_11_keyword_calls(make: Callable) -> None:
    ops = old("keywords", gemm), make("keywords", gemm)
    a, b, bias = inputs()
    for args, kwargs in [
        ((), {"b": b, "a": a}),
        ((a,), {"b": b, "scale": 3.0}),
        ((a, b), {"scale": 0.5, "bias": bias}),
        ((), {"scale": 0.5, "bias": bias, "a": a, "b": b}),
    ]:
        expected = ops[0](*args, **kwargs)
        assert all(torch.equal(call(*args, **kwargs), expected) for call in handles(ops[1]))
    for args, kwargs in [((a, b), {"a": a}), ((a, b), {"x": 1}), ((a,), {}), ((a,), {"scale": 1})]:
        texts = [text_of(lambda op=op, p=args, k=kwargs: op(*p, **k)) for op in ops]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["nonamespace", "a::b::c", ""])
def test_12_bad_qualname(name: str) -> None:
    refused = [
        lambda: torch.library.custom_op(name, gemm, mutates_args=()),
        lambda: hotop.custom_op(name, gemm, mutates_args=()),
    ]
    texts = [text_of(call) for call in refused]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="namespace::name"):
        hotop.fast_custom_op(name)(gemm)


@pytest.mark.parametrize("mutates", [("nothing",), ("a", "zzz"), "a", ("bias", "scale")], ids=str)
def test_13_bad_mutates_args(mutates: Any) -> None:
    refused = [
        lambda: torch.library.custom_op("parity_old::m", gemm, mutates_args=mutates),
        lambda: hotop.custom_op("parity_new::m", gemm, mutates_args=mutates),
    ]
    texts = [text_of(call) for call in refused]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match=r"mutates_args|mutate") as caught:
        hotop.fast_custom_op("parity_fast::m", mutates_args=mutates, device_types="CPU")(gemm)
    named = [mutates] if isinstance(mutates, str) else mutates
    assert any(name in str(caught.value) for name in named)
