"""What is registered after the definition counts from the next call, from Python and from C++."""

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

import hotop

CPP = textwrap.dedent(
    """
    #include <ATen/ATen.h>
    #include <torch/library.h>

    at::Tensor plus_hundred(const at::Tensor& x) { return x + 100; }
    at::Tensor plus_thousand(const at::Tensor& x) { return x + 1000; }

    // A namespace that C++ declares first, and one that it only adds to.
    TORCH_LIBRARY(cpp_first, m) { m.def("own(Tensor x) -> Tensor"); }
    TORCH_LIBRARY_IMPL(cpp_first, CPU, m) { m.impl("own", plus_hundred); }
    TORCH_LIBRARY_FRAGMENT(cpp_fragment, m) { m.def("own(Tensor x) -> Tensor"); }

    // A late override of an op that Python defined: what TORCH_LIBRARY_IMPL does, when called.
    std::unique_ptr<torch::Library> late;
    extern "C" void override_key(const char* ns, const char* name, const char* key) {
      late = std::make_unique<torch::Library>(torch::Library::IMPL, ns,
          c10::parseDispatchKey(key), __FILE__, __LINE__);
      late->impl(name, plus_thousand);
    }
    extern "C" void undo() { late.reset(); }
    """
)


@pytest.fixture(scope="module")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    # Not torch.utils.cpp_extension.load_inline: its link line breaks where a path has a space.
    folder: Path = tmp_path_factory.mktemp("extension")
    source, library = folder / "override.cpp", folder / "override.so"
    source.write_text(CPP)
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-shared", "-fPIC", str(source)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{path}" for path in library_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    subprocess.run([*command, "-ltorch_cpu", "-lc10", "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def define(qualname: str, **options: object):  # type: ignore[no-untyped-def]
    def body(x: Tensor) -> Tensor:
        return x + 1

    return hotop.custom_op(qualname, body, mutates_args=(), **options)


@pytest.mark.parametrize("key", ["CPU", "AutogradCPU", "ADInplaceOrView", "AutocastCPU"])
def test_cpp_override(cpp: ctypes.CDLL, key: str) -> None:
    op = define(f"late_{key.lower()}::f")
    x = torch.zeros(1)
    handles = (op, op._opoverload, op._opoverload.overloadpacket)
    assert [h(x).item() for h in handles] == [1, 1, 1]
    cpp.override_key(f"late_{key.lower()}".encode(), b"f", key.encode())
    try:
        with torch.autocast("cpu"):
            assert [h(x).item() for h in handles] == [1000, 1000, 1000]
            assert not hotop.explain(op, x).direct
        assert op(x).item() == (1 if key == "AutocastCPU" else 1000)
    finally:
        cpp.undo()
    assert op(x).item() == 1
    assert hotop.explain(op, x).direct


def test_namespaces_declared_by_cpp(cpp: ctypes.CDLL) -> None:
    for namespace in ("cpp_first", "cpp_fragment"):
        op = define(f"{namespace}::f")
        assert hotop.explain(op, torch.zeros(1)).direct
        assert getattr(torch.ops, namespace).f(torch.zeros(1)).item() == 1
    assert torch.ops.cpp_first.own(torch.zeros(1)).item() == 100


@pytest.mark.parametrize(
    "key", ["CPU", "Autograd", "AutogradCPU", "ADInplaceOrView", "AutocastCPU"]
)
@pytest.mark.filterwarnings("ignore:Warning only once")
def test_python_override(key: str) -> None:
    op = define(f"late_py_{key.lower()}::f")
    x = torch.zeros(1)
    assert op(x).item() == 1
    library = torch.library.Library(f"late_py_{key.lower()}", "IMPL")
    with torch.autocast("cpu"):
        library.impl("f", lambda x: x + 1000, key)
        assert op(x).item() == 1000
        library._destroy()
        assert op(x).item() == 1
        assert hotop.explain(op, x).direct


def test_kernels_are_replaced_and_disabled() -> None:
    op = define("late_kernels::f")
    x = torch.zeros(1)
    assert op(x).item() == 1

    @op.register_kernel("cpu")
    def _(x: Tensor) -> Tensor:
        return x + 2

    assert op(x).item() == 2
    op.register_kernel("cpu", lambda x: x + 3)
    assert op(x).item() == 3
    with op.set_kernel_enabled("cpu", False):
        assert op(x).item() == 1
        assert hotop.explain(op, x).direct
        with op.set_kernel_enabled("cpu", True):
            assert op(x).item() == 3
        assert op(x).item() == 1
    assert op(x).item() == 3
    with pytest.raises(KeyError), op.set_kernel_enabled("cpu", False):
        raise KeyError
    assert op(x).item() == 3
    torch.library.register_kernel("late_kernels::f", "cpu", lambda x: x + 4)
    assert op(x).item() == 4


def test_each_device_of_a_list_keeps_its_own_kernel() -> None:
    op = define("late_list::f", device_types=["cpu", "cuda"])
    op.register_kernel("cuda", lambda x: x + 50)
    assert op(torch.zeros(1)).item() == 1


def test_devices_of_an_op_without_tensors_are_added_in_silence() -> None:
    """In a process of its own: PyTorch warns of a replaced kernel only once."""
    program = textwrap.dedent(
        """
        import hotop, torch
        def body(n: int, device: torch.device) -> torch.Tensor:
            return torch.ones(n)
        op = hotop.custom_op("quiet::f", body, mutates_args=(), device_types=["cpu", "cuda"])
        op.register_kernel("xpu")(body)
        assert op(2, torch.device("cpu")).shape == (2,)
        assert hotop.explain(op, 2, torch.device("cpu")).direct
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "previously registered kernel" not in done.stderr


def test_overloads_and_packets() -> None:
    one = define("late_overloads::f")
    packet = torch.ops.late_overloads.f
    assert hotop.explain(packet, torch.zeros(1)).direct

    @hotop.custom_op("late_overloads::f.two", mutates_args=())
    def two(x: Tensor, y: Tensor) -> Tensor:
        return x + y + 10

    x = torch.zeros(1)
    assert packet is torch.ops.late_overloads.f
    assert set(packet.overloads()) == {"default", "two"}
    assert packet(x).item() == 1
    assert packet(x, x).item() == 10
    assert two(x, x).item() == 10
    assert one(x).item() == 1
    assert hotop.explain(two, x, x).direct
    assert hotop.explain(packet.two, x, x).direct
    assert "several overloads" in hotop.explain(packet, x).reason


def test_redefinition_serves_every_handle() -> None:
    x = torch.zeros(1)
    old = define("late_redefined::f")
    stale = (old, torch.ops.late_redefined.f, torch.ops.late_redefined.f.default)

    def body(x: Tensor) -> Tensor:
        return x + 2

    new = hotop.custom_op("late_redefined::f", body, mutates_args=())
    assert [handle(x).item() for handle in (*stale, new)] == [2, 2, 2, 2]
    assert "replaced or removed" in hotop.explain(old, x).reason or not hotop.explain(old, x).direct
    new._lib._destroy()
    for handle in (*stale, new):
        with pytest.raises(RuntimeError, match="the definition of this op was removed"):
            handle(x)
