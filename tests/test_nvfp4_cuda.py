"""The NVFP4 kernels for NVIDIA GPUs, as far as a machine without one can test them.

The code of a GPU thread is compiled for the host and compared with the reference bit for bit; the
library is built and loaded if nvcc is there; PyTorch's meta functions see the matmul's arguments.
The tests at the end need a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hotop._versions import HAS_PYOBJECT_DISPATCH
from hotop.nvfp4 import _cuda, reference
from nvfp4_data import DATA, floats, ordinary

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "csrc" / "nvfp4_cuda"
NVCC = shutil.which("nvcc")

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is needed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA GPU is needed")


@pytest.fixture(autouse=True)
def forget_library() -> Iterator[None]:
    """What `_cuda` found out in one test is not for the next."""
    yield
    _cuda._load.cache_clear()
    _cuda._warn_once.cache_clear()


def compile_for_host(directory: Path, abi_version: int) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("g++ is needed")
    library = directory / f"host{abi_version}.so"
    command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
    command += ["-fPIC", "-shared", f"-I{SOURCES}", f"-DABI_VERSION={abi_version}"]
    source = ROOT / "tests" / "data" / "nvfp4_cuda_host.cpp"
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = compile_for_host(tmp_path_factory.mktemp("host"), _cuda._ABI_VERSION)
    library, problem = _cuda._open(str(path))
    assert problem is None
    assert library is not None
    return library


def map_host(host: ctypes.CDLL, name: str, input: Tensor, dtype: torch.dtype) -> Tensor:
    assert input.is_contiguous()
    result = torch.empty_like(input, dtype=dtype)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (input, result)]
    getattr(host, name)(pointers[0], ctypes.c_int64(input.numel()), pointers[1])
    return result


def test_rounding(host: ctypes.CDLL) -> None:
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    e2m1 = torch.tensor(reference._E2M1_VALUES)
    for name, values, encode in (
        ("e4m3", e4m3, reference._e4m3),
        ("e2m1", e2m1, reference._e2m1),
    ):
        input = floats(-12, 10, torch.cat([values, (values[1:] + values[:-1]) / 2]))
        got = map_host(host, f"encode_{name}_all", input, torch.uint8)
        assert torch.equal(got, encode(input)), name


def test_decoding(host: ctypes.CDLL) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = map_host(host, "decode_e4m3_all", codes, torch.float32)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(got.view(torch.int32)[:127], expected.view(torch.int32)[:127])
    assert torch.equal(got.view(torch.int32)[128:255], expected.view(torch.int32)[128:255])
    assert got[[127, 255]].isnan().all()


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("swizzled", [False, True], ids=["linear", "swizzled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("data", DATA, ids=lambda data: data.__name__)
def test_kernel_on_host(
    host: ctypes.CDLL, data: Callable[[int, int], Tensor], dtype: torch.dtype, swizzled: bool
) -> None:
    input = data(130, 336).to(dtype)
    for value in (1.0, 137.0, 1e-30, 2.0**20, -2.0, math.inf, math.nan, 0.0):
        g = torch.tensor([value])
        got = _cuda._launch(host, input, g, swizzled, 0)
        assert_same(got, reference.quantize(input, g, swizzled))


SHAPES = [(16,), (1, 16), (3, 80), (128, 64), (2, 3, 48), (0, 32), (3, 0), (0, 0), (2, 0, 16)]


@pytest.mark.parametrize("swizzled", [False, True], ids=["linear", "swizzled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_on_host(host: ctypes.CDLL, shape: tuple[int, ...], swizzled: bool) -> None:
    input, g = torch.randn(shape), torch.tensor(3.0)
    got = _cuda._launch(host, input, g, swizzled, 0)
    assert_same(got, reference.quantize(input, g, swizzled))


STRIDED = {
    "rows apart": lambda x: x[:, :48],
    "rows apart by an odd number": lambda x: x.reshape(-1)[:3900].reshape(50, 78)[:, :64],
    "odd address": lambda x: x.reshape(-1)[1:1601].reshape(50, 32),
    "every other column": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "one row, expanded": lambda x: x[:1].expand(5, -1),
    "three dimensions": lambda x: x.reshape(8, 8, 64).transpose(0, 1)[:, :, 16:48],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_on_host(host: ctypes.CDLL, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        input, g = STRIDED[name](ordinary(64, 64).to(dtype)), torch.tensor([50.0])
        assert_same(_cuda._launch(host, input, g, True, 0), reference.quantize(input, g, True))


def test_error_of_the_library(host: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError, match=r"quantize: CUDA error 1: invalid argument$"):
        _cuda._launch(host, torch.zeros(1, 16), torch.ones(1), False, 1)


def test_library_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "built without its CUDA kernels" in str(_cuda.library_problem())
    with pytest.warns(UserWarning, match="built without its CUDA kernels"):
        _cuda._warn_once(str(_cuda.library_problem()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _cuda._warn_once(str(_cuda.library_problem()))


def test_library_of_another_interface(tmp_path: Path) -> None:
    path = compile_for_host(tmp_path, _cuda._ABI_VERSION + 1)
    library, problem = _cuda._open(str(path))
    assert library is None
    assert re.search(r"have interface \d+, this hotop needs \d+: rebuild", str(problem))


def test_library_broken(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_text("no library")
    library, problem = _cuda._open(str(path))
    assert library is None
    assert "cannot be loaded" in str(problem)


def test_arguments_of_quantize() -> None:
    cpu, g = torch.zeros(1, 16), torch.ones(1)
    with pytest.raises(ValueError, match="must be on one CUDA device, got cpu and cpu"):
        _cuda.quantize(cpu, g)
    with pytest.raises(ValueError, match="scaling_vector_size must be 16, got 32"):
        _cuda.quantize(cpu, g, 32)


def operands(m: int, n: int, k: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def scales(rows: int) -> Tensor:
        size = reference.swizzled_size(rows, k // 16)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def packed(rows: int) -> Tensor:
        return torch.empty(rows, k // 2, dtype=torch.uint8, device=device)

    return packed(m), packed(n), scales(m), scales(n), torch.empty((), device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pytorch_accepts_the_matmul(dtype: torch.dtype) -> None:
    """Its meta function for CUDA checks dtypes, strides, recipes, swizzles and sizes."""
    with FakeTensorMode():
        for m, n, k in ((130, 64, 96), (1, 16, 32), (257, 2048, 4096)):
            act, weight, act_sf, weight_scale, alpha = operands(m, n, k, "cuda")
            assert _cuda._fits_block_scaled_mm(act, weight)
            one = torch.ones(1, device="cuda")
            result = _cuda._block_scaled_mm(
                act.reshape(1, m, -1), weight, act_sf, weight_scale, alpha, one, dtype
            )
            assert (result.shape, result.dtype) == ((1, m, n), dtype)


@pytest.mark.skipif(HAS_PYOBJECT_DISPATCH, reason="the fake kernel of 2.14 checks no sizes")
@pytest.mark.parametrize(("n", "k"), [(24, 64), (32, 48)])
def test_pytorch_refuses_what_does_not_fit(n: int, k: int) -> None:
    """Else the decoded road would be taken for no reason."""
    with FakeTensorMode():
        act, weight, act_sf, weight_scale, alpha = operands(64, n, k, "cuda")
        assert not _cuda._fits_block_scaled_mm(act, weight)
        one = torch.ones(1, device="cuda")
        with pytest.raises(RuntimeError, match="divisible by 16"):
            _cuda._block_scaled_mm(act, weight, act_sf, weight_scale, alpha, one, torch.bfloat16)


def test_gemm_checks_before_it_launches() -> None:
    act, weight, act_sf, weight_scale, alpha = operands(4, 16, 32, "cpu")
    good = [act, weight, act_sf, weight_scale, alpha, torch.bfloat16]
    for index, value, error, message in (
        (0, act.float(), TypeError, "act_fp4 must be uint8, got Float"),
        (1, weight[:, :8], ValueError, "weight must have 16 bytes in a row as act_fp4 has, got 8"),
        (2, act_sf[:-1], ValueError, "act_sf must be 1-D with 512 elements"),
        (3, weight_scale.reshape(2, -1), ValueError, "weight_scale must be 1-D with 512 elements"),
        (4, torch.ones(2), ValueError, "alpha must have one element"),
        (5, torch.int8, TypeError, "output_dtype must be float32, bfloat16 or float16, got Char"),
    ):
        arguments = [*good[:index], value, *good[index + 1 :]]
        with pytest.raises(error, match="^nvfp4_gemm: " + message):
            _cuda.gemm(*arguments)


def cmake(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Configure and build a project that only includes nvfp4_cuda.cmake."""
    directory.mkdir(exist_ok=True)
    (directory / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(test LANGUAGES NONE)\n"
        f'include("{ROOT / "cmake" / "nvfp4_cuda.cmake"}")\n'
        'install(CODE "message(STATUS installed)")\n'
    )
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"]}
    build = directory / "build"
    done = None
    for command in (
        ["cmake", "-S", str(directory), "-B", str(build), "-G", "Ninja", *options],
        ["cmake", "--build", str(build)],
        ["cmake", "--install", str(build), "--prefix", str(directory / "installed")],
    ):
        done = subprocess.run(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        text = done.stdout
        if done.returncode != 0 or "without the CUDA kernels" in text:
            break
    assert done is not None
    return done


needs_cmake = pytest.mark.skipif(
    shutil.which("cmake", path=str(Path(sys.executable).parent)) is None
    and shutil.which("cmake") is None,
    reason="cmake is needed",
)


@needs_cmake
def test_build_without_nvcc(tmp_path: Path) -> None:
    absent = f"-DHOTOP_NVCC={tmp_path / 'absent'}"
    done = cmake(tmp_path / "auto", absent)
    assert done.returncode == 0
    assert "no working nvcc" in done.stdout
    done = cmake(tmp_path / "on", absent, "-DHOTOP_CUDA=ON")
    assert done.returncode != 0
    assert "HOTOP_CUDA=ON, but there is no working nvcc" in done.stdout


@needs_cmake
def test_build_with_an_nvcc_that_fails(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "release 13.0, no host compiler"\ntest "$1" = --version\n')
    nvcc.chmod(0o755)
    done = cmake(tmp_path / "auto", f"-DHOTOP_NVCC={nvcc}")
    assert done.returncode == 0
    assert "nvcc failed; built without the CUDA kernels" in done.stdout
    assert "no host compiler" in done.stdout
    done = cmake(tmp_path / "on", f"-DHOTOP_NVCC={nvcc}", "-DHOTOP_CUDA=ON")
    assert done.returncode != 0
    done = cmake(tmp_path / "off", f"-DHOTOP_NVCC={nvcc}", "-DHOTOP_CUDA=OFF")
    assert done.returncode == 0
    assert "nvcc failed" not in done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as CMake builds and installs it."""
    directory = tmp_path_factory.mktemp("cuda") / "a path with spaces"
    done = cmake(directory, "-DHOTOP_CUDA=ON")
    assert done.returncode == 0, done.stdout
    return directory / "installed" / "hotop" / "_nvfp4_cuda.so"


@needs_nvcc
@needs_cmake
def test_built_library(built: Path) -> None:
    """It loads without a GPU or a driver, checks its arguments and reports CUDA's error."""
    library, problem = _cuda._open(str(built))
    assert problem is None
    assert library is not None

    def run(rows: int, k: int, dtype: int = 0) -> int:
        return library.hotop_nvfp4_cuda_quantize(0, rows, k, k, dtype, 0, 0, 0, 1, 0, 0)

    assert (run(0, 16), run(4, 0)) == (0, 0), "nothing to do: no launch"
    assert (run(1, 8), run(1, 16, 3), run(-1, 16)) == (1, 1, 1), "cudaErrorInvalidValue"
    if not torch.cuda.is_available():
        error = run(1, 16)
        assert error not in (0, 1)
        assert library.hotop_nvfp4_cuda_error_string(error).decode() not in ("", "no error")


@needs_nvcc
@pytest.mark.parametrize("target", ["80", "90", "100a", "103a", "120a"])
def test_instructions(target: str, tmp_path: Path) -> None:
    version = subprocess.run([str(NVCC), "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    assert release is not None
    if target.endswith("a") and tuple(map(int, release.groups())) < (12, 9):
        pytest.skip("this nvcc does not know the target")
    build = (ROOT / "cmake" / "nvfp4_cuda.cmake").read_text()
    exact = [flag for flag in ("--ftz=false", "--prec-div=true", "--fmad=false") if flag in build]
    assert len(exact) == 3
    ptx = tmp_path / "quantize.ptx"
    command = [str(NVCC), "-ptx", "-std=c++17", "-O3", f"-arch=compute_{target}", *exact]
    subprocess.run([*command, str(SOURCES / "quantize.cu"), "-o", str(ptx)], check=True)
    text = ptx.read_text()
    assert ("cvt.rn.satfinite.e2m1x2.f32" in text) == target.endswith("a")
    assert ("cvt.rn.satfinite.e4m3x2.f32" in text) == (target != "80")
    assert "rcp.rn.f32" in text
    # Exact arithmetic, and neither emulation in double precision nor arrays in memory.
    assert not re.search(r"\.ftz|\.approx|\.f64|\.local", text)
    assert "ld.global.v4" in text


@needs_gpu
@needs_nvcc
@needs_cmake
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("data", DATA, ids=lambda data: data.__name__)
def test_kernel_on_gpu(built: Path, data: Callable[[int, int], Tensor], dtype: torch.dtype) -> None:
    library, _ = _cuda._open(str(built))
    assert library is not None
    stream = torch.cuda.current_stream().cuda_stream
    for rows, k in ((130, 336), (1, 16), (2050, 4096)):
        input = data(rows, k).to(dtype)
        for value in (1.0, 137.0, 1e-30, 2.0**20, -2.0, math.inf, math.nan, 0.0):
            for swizzled in (False, True):
                g = torch.tensor([value])
                got = _cuda._launch(library, input.cuda(), g.cuda(), swizzled, stream)
                expected = reference.quantize(input, g, swizzled)
                assert_same([tensor.cpu() for tensor in got], expected)


@needs_gpu
@pytest.mark.parametrize(("m", "n", "k"), [(130, 64, 96), (7, 24, 48), (256, 512, 1024)])
def test_gemm_on_gpu(m: int, n: int, k: int) -> None:
    g = torch.tensor([100.0])
    act, act_sf = reference.quantize(ordinary(m, k), g, True)
    weight, weight_scale = reference.quantize(ordinary(n, k), g, True)
    arguments = [act, weight, act_sf, weight_scale, 1.0 / (g * g)]
    expected = reference.gemm(*arguments, torch.float32)
    got = _cuda.gemm(*(tensor.cuda() for tensor in arguments), torch.float32)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-4)
