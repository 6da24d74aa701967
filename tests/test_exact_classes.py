"""Where PyTorch asks for the very class of an op, read from its sources, and what hotop leaves."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import hotop
from hotop import _existing

TORCH = Path(torch.__file__).parent
CLASSES = {"OpOverload", "OpOverloadPacket", "CustomOpDef"}
COLLECTIVE = "_inductor/ir.py _CollectiveKernel.set_cpp_kernel_name"
# Every use of the three classes in torch/ that is no isinstance, annotation, base or union of
# types, by file and function; the same on PyTorch 2.13, 2.14 and 2.15. One more fails the test
# below: look whether it refuses, or treats differently, an object of a subclass.
KNOWN = {
    COLLECTIVE: "an assertion: such ops are left, see hotop._existing.EXACT_CLASS",
    "_export/verifier.py Verifier.allowed_op_types": "given to isinstance",
    "_inductor/fuzzer.py SamplingMethod._generate_value_for_type": "compares type hints",
    "_inductor/lowering.py": "sets of operators, named by their type",
    "_inductor/subgraph_lowering.py": "names of types",
    "_library/custom_ops.py custom_op.inner": "makes a CustomOpDef",
    "_ops.py OpOverloadPacket.__getattr__": "makes an OpOverload",
    "_ops.py _OpNamespace.__getattr__": "makes an OpOverloadPacket",
    "fx/node.py": "a union of types, for annotations",
    "fx/proxy.py": "the shortcut of TracerBase.create_arg: isinstance decides after it",
}


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


class _Uses(ast.NodeVisitor):
    """Collects by enclosing function the uses of the classes that may compare them exactly."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._where: list[str] = []
        self._statement = ""

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement = f"line {node.lineno}: {ast.unparse(node).splitlines()[0][:120]}"
        if _name(node) in CLASSES:
            self.found[".".join(self._where)] = self._statement
            return
        super().visit(node)

    def _visit_within(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._where.append(node.name)
        for inner in [*node.decorator_list, *node.body]:  # neither bases nor annotations
            self.visit(inner)
        self._where.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _visit_within

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name in CLASSES and alias.asname is not None:
                self.found[".".join(self._where)] = self._statement

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and _name(node.annotation) != "TypeAlias":
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        seen = node.args
        if _name(node.func) in ("isinstance", "issubclass", "cast"):
            seen = node.args[:1] if _name(node.func) != "cast" else node.args[1:]
        else:
            self.visit(node.func)
        for argument in [*seen, *(keyword.value for keyword in node.keywords)]:
            self.visit(argument)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        # A union of types cannot be compared with a type.
        if not isinstance(node.op, ast.BitOr):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        # type(op).__name__ == "OpOverload" holds for hotop's classes too: they have that name.
        pass


@cache
def uses() -> dict[str, str]:
    """Return "file function" -> statement."""
    found = {}
    for path in sorted(TORCH.rglob("*.py")):
        name = path.relative_to(TORCH).as_posix()
        text = path.read_text(encoding="utf-8")
        if name.startswith("testing/") or not any(cls in text for cls in CLASSES):
            continue
        visitor = _Uses()
        visitor.visit(ast.parse(text))
        for where, statement in visitor.found.items():
            found[f"{name} {where}".rstrip()] = statement
    return found


def test_every_use_of_the_classes_is_known() -> None:
    found = uses()
    new = {where: line for where, line in found.items() if where not in KNOWN}
    assert not new, (
        f"PyTorch {torch.__version__} uses the class of an op in places where nobody has looked "
        f"whether hotop's passes: {new}"
    )
    gone = KNOWN.keys() - found.keys()
    assert not gone, f"PyTorch {torch.__version__} has no longer (see EXACT_CLASS): {gone}"


@pytest.mark.parametrize(
    "code",
    [
        "assert type(op) is torch._ops.OpOverload",
        "if op.__class__ == OpOverload: pass",
        "TABLE = {OpOverloadPacket: f}",
        "found = TABLE[CustomOpDef]",
        "def f(x: OpOverload): return type(x) in (OpOverload, int)",
        "class C:\n    def m(self): return [t for t in (OpOverload,) if type(self) is t]",
        "dispatch.register(OpOverload, f)",
        "from torch._ops import OpOverload as Op",
    ],
)
def test_the_reader_finds(code: str) -> None:
    visitor = _Uses()
    visitor.visit(ast.parse(code))
    assert visitor.found


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(op, (torch._ops.OpOverload, int))",
        "def f(x: OpOverload) -> CustomOpDef: pass",
        "class C(OpOverload): pass",
        "x = cast(OpOverload, y)",
        "T: TypeAlias = OpOverload | int",
        "from torch._ops import OpOverload",
        "name = 'OpOverload'",
    ],
)
def test_the_reader_passes(code: str) -> None:
    visitor = _Uses()
    visitor.visit(ast.parse(code))
    assert not visitor.found


# Which operators get a _CollectiveKernel.

MAKERS = {
    *("create_inplace", "create_out_of_place", "create_wait", "_create_out_of_place"),
    *("_CollectiveKernel", "_AllReduceKernel", "_AllReduce_Kernel", "_WaitKernel"),
}
# The bodies of these, and what they hand on.
PASSED_ON = {"kernel", "cls"}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in MAKERS:
            yield node


def _spelled(node: ast.AST, names: dict[str, str]) -> str:
    text = ast.unparse(node)
    head, _, rest = text.partition(".")
    return f"{names[head]}.{rest}".rstrip(".") if head in names else text


def collectives() -> set[str]:
    """Return the operators that Inductor's sources lower to such a kernel, as they spell them."""
    found = set()
    for path in sorted((TORCH / "_inductor").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(maker in text for maker in MAKERS):
            continue
        tree = ast.parse(text)
        names: dict[str, str] = {}
        for node in ast.walk(tree):  # in the order of the sources, near enough: names are unique
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = _spelled(node.value, names)
                if value.startswith("torch.ops."):
                    names[node.targets[0].id] = value
        for call in _calls(tree):
            at = 1 if (_name(call.func) or "").endswith("Kernel") else 0
            if len(call.args) > at:
                found.add(_spelled(call.args[at], names))
    return found - PASSED_ON


def test_all_collectives_are_left() -> None:
    found = collectives()
    odd = {name for name in found if not name.startswith("torch.ops.")}
    assert not odd, f"Inductor lowers ops to a _CollectiveKernel in a way that is new: {odd}"
    namespaces = {name.split(".")[2] for name in found}
    assert {"_c10d_functional", "_dtensor", "symm_mem"} <= namespaces
    assert namespaces <= _existing.EXACT_CLASS, "leave these in hotop._existing.EXACT_CLASS"


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("namespace", sorted(_existing.EXACT_CLASS))
def test_such_ops_are_left_whoever_makes_them(namespace: str) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("hotop_test(Tensor x) -> Tensor")
    library.impl("hotop_test", lambda x: x + 1, "CPU")
    held = getattr(torch.ops, namespace).hotop_test.default
    hotop.install()
    hotop.accelerate(namespace)

    @torch.library.custom_op(f"{namespace}::hotop_custom", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert type(custom) is torch._library.custom_ops.CustomOpDef
    for overload in (held, custom._opoverload):
        assert type(overload) is torch._ops.OpOverload
        assert overload(torch.ones(1)).item() == 2
        assert overload.overloadpacket(torch.ones(1)).item() == 2
        assert "very class" in hotop.report().left[overload._name]
    library._destroy()
    custom._lib._destroy()


PROGRAM = """
import sys, torch, hotop
import torch.distributed as dist
import torch.distributed._symmetric_memory, torch.distributed.tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
group, ops = dist.group.WORLD.group_name, torch.ops
library = torch.library.Library("symm_mem", "IMPL")
library.impl("_low_contention_all_gather", lambda x, g: torch.cat([x, x]), "CPU")
library.impl("_low_contention_reduce_scatter", lambda x, r, g: x[:2] * 2, "CPU")
if "on" in sys.argv:
    hotop.install()
    for name in ("aten", "c10d_functional", *{namespaces!r}):
        if any(op.startswith(name + "::") for op in torch._C._dispatch_get_all_op_names()):
            hotop.accelerate(name)
c10d, wait = ops._c10d_functional, ops._c10d_functional.wait_tensor
programs = [
    lambda x: wait(c10d.all_reduce(x * 2, "sum", group)),
    lambda x: wait(c10d.all_gather_into_tensor(x * 2, 2, group)),
    lambda x: wait(c10d.reduce_scatter_tensor(x * 2, "sum", 2, group)),
    lambda x: wait(c10d.all_to_all_single(x * 2, [2, 2], [2, 2], group)),
    lambda x: wait(c10d.broadcast(x * 2, 0, group)),
    lambda x: wait(ops.symm_mem._low_contention_all_gather(x * 2, group)),
    lambda x: wait(ops.symm_mem._low_contention_reduce_scatter(x * 2, "sum", group)),
    lambda x: wait(ops._dtensor.shard_dim_alltoall(x * 2, 0, 1, group)),
]
for program in programs:
    torch._dynamo.reset()
    print(torch.compile(program, fullgraph=True)(torch.ones(4, 4)).shape)
"""


def test_collectives_compile() -> None:
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    program = PROGRAM.replace("{namespaces!r}", repr(tuple(sorted(_existing.EXACT_CLASS))))
    answers = []
    for mode in ("off", "on"):
        done = subprocess.run(
            [sys.executable, "-c", program, mode],
            # The cache would answer for a graph whose lowering fails.
            env={**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answers.append(done.stdout)
    assert answers[0] == answers[1]
    assert answers[0].count("torch.Size") == 8
