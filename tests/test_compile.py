"""Dynamo, AOTAutograd, Inductor, export and make_fx see ``torch.ops.ns.name.default`` only."""

import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import hotop

OPS = torch.ops.compiled


@hotop.custom_op("compiled::scale", mutates_args=())
def scale(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


@scale.register_fake
def _(x: Tensor, factor: float = 2.0) -> Tensor:
    return torch.empty_like(x)


@hotop.custom_op("compiled::accumulate", mutates_args={"out"})
def accumulate(x: Tensor, out: Tensor) -> None:
    out += x


@hotop.custom_op("compiled::halves", mutates_args=())
def halves(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return x[:n].clone(), x[n:].clone()


@halves.register_fake
def _(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(n), x.new_empty(x.shape[0] - n)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("how", [scale, OPS.scale, OPS.scale.default])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_fullgraph(how: Callable[..., Tensor], backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x: how(x + 1, 3.0) - 1, backend=counter, fullgraph=True)
    x = torch.randn(4)
    assert torch.equal(compiled(x), (x + 1) * 3 - 1)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert any(target in (OPS.scale, OPS.scale.default) for target in targets)


def test_compiled_code_takes_the_direct_road() -> None:
    compiled = torch.compile(lambda x: scale(x + 1), fullgraph=True)
    x = torch.randn(4)
    with torch.no_grad():
        compiled(x)
        before = scale._plan.direct_calls
        for _ in range(10):
            compiled(x)
    assert scale._plan.direct_calls == before + 10


def test_dynamic_shapes_make_one_graph() -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        lambda x, n: halves(x, n)[0].sum() + halves(x, n)[1].sum(),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for size in (6, 7, 11):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x, 3), x[:3].sum() + x[3:].sum())
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_mutation(backend: str) -> None:
    def step(x: Tensor, out: Tensor) -> Tensor:
        accumulate(x * 2, out)
        return out + 1

    out = torch.zeros(3)
    got = torch.compile(step, backend=backend, fullgraph=True)(torch.ones(3), out)
    assert torch.equal(out, torch.full((3,), 2.0))
    assert torch.equal(got, torch.full((3,), 3.0))


def test_training() -> None:
    @hotop.custom_op("compiled::square", mutates_args=())
    def square(x: Tensor) -> Tensor:
        return x * x

    square.register_fake(torch.empty_like)
    square.register_autograd(
        lambda ctx, grad: grad * 2 * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    for backend in ("aot_eager", "inductor"):
        x = torch.randn(3, requires_grad=True)
        torch.compile(lambda x: square(x).sum(), backend=backend, fullgraph=True)(x).backward()
        assert torch.equal(x.grad, 2 * x.detach())


def test_effects() -> None:
    from torch._higher_order_ops.effects import _EffectType

    seen: list[float] = []

    @hotop.custom_op("compiled::log", mutates_args=())
    def log(x: Tensor) -> None:
        seen.append(x.sum().item())

    log.register_fake(lambda x: None)
    log.register_effect(_EffectType.ORDERED)

    def program(x: Tensor) -> Tensor:
        log(x)
        log(x + 1)
        return x * 2

    torch.compile(program, backend="inductor", fullgraph=True)(torch.ones(1))
    assert seen == [1.0, 2.0]


def targets(graph: torch.fx.Graph) -> set[object]:
    return {node.target for node in graph.nodes if node.op == "call_function"}


def test_make_fx() -> None:
    traced = make_fx(lambda x: scale(x, 3.0))(torch.ones(2))
    assert targets(traced.graph) == {OPS.scale.default}
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 3.0))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.op = scale
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x * self.weight)


def test_export_save_load() -> None:
    x = torch.randn(3)
    program = torch.export.export(Model(), (x,))
    assert OPS.scale.default in targets(program.graph)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    assert torch.equal(loaded.module()(x), x * 2)
    assert OPS.scale.default in targets(loaded.graph)


def test_graph_modules_pickle() -> None:
    traced = make_fx(lambda x: scale(x, 3.0))(torch.ones(2))
    again = pickle.loads(pickle.dumps(traced))
    assert torch.equal(again(torch.ones(2)), torch.full((2,), 3.0))


def test_fx_pattern_matchers_match() -> None:
    """A pattern written for the op finds it, with FX's matcher and with Inductor's."""
    from torch._inductor.pattern_matcher import (
        Arg,
        CallFunction,
        PatternMatcherPass,
        register_graph_pattern,
    )
    from torch.fx import replace_pattern

    traced = make_fx(lambda x: scale(x, 3.0) + 1)(torch.ones(2))
    replaced = replace_pattern(
        traced,
        lambda x: torch.ops.compiled.scale.default(x, 3.0),
        lambda x: torch.ops.aten.mul.Tensor(x, 5.0),
    )
    assert len(replaced) == 1
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 6.0))

    passes = PatternMatcherPass()

    @register_graph_pattern(CallFunction(OPS.scale.default, Arg(), Arg()), pass_dict=passes)
    def _(match, x, factor):  # type: ignore[no-untyped-def]
        match.replace_by_example(lambda x: torch.ops.aten.mul.Tensor(x, 7.0), [x])

    traced = make_fx(lambda x: scale(x, 3.0) + 1)(torch.ones(2))
    assert passes.apply(traced.graph) == 1
    traced.recompile()
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 8.0))


def test_opcheck() -> None:
    torch.library.opcheck(scale, (torch.randn(3), 2.0))
    torch.library.opcheck(OPS.scale.default, (torch.randn(3),))
    torch.library.opcheck(accumulate, (torch.randn(3), torch.randn(3)))
    torch.library.opcheck(halves, (torch.randn(5), 2))


def test_kernel_is_not_traced_under_a_frame_callback() -> None:
    """Called from a frame that Dynamo is still watching, the kernel runs as plain Python."""
    seen: list[str] = []

    @hotop.custom_op("compiled::spy", mutates_args=())
    def spy(x: Tensor) -> Tensor:
        seen.append("compiling" if torch.compiler.is_compiling() else type(x).__name__)
        return helper(x)

    def helper(x: Tensor) -> Tensor:
        return x + 1

    counter = CompileCounterWithBackend("eager")

    @torch._dynamo.disable(recursive=False)
    def undisturbed(x: Tensor) -> Tensor:
        return spy(x)

    @torch.compile(backend=counter)
    def program(x: Tensor) -> Tensor:
        y = x * 2
        return undisturbed(y) + 1

    for _ in range(3):
        assert torch.equal(program(torch.ones(1)), torch.full((1,), 4.0))
    assert seen == ["Tensor"] * 3
    compiled_code = [str(graph.code) for graph in counter.graphs]
    assert counter.frame_count == 2, compiled_code  # before and after the break, not the kernel
