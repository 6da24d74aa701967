"""NVFP4 against other people's code: the host code of NVIDIA's headers, bit for bit, and torchao.

Both come from the package index into pytest's cache, for these tests only. Where they cannot be
had, the tests are skipped and say so.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hotop.nvfp4 import reference
from nvfp4_data import DATA, floats, ordinary

HEADERS = (
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
)
TORCHAO = ("torchao==0.18.0",)
SOURCE = Path(__file__).parent / "data" / "nvfp4_oracle.cpp"

Quantize = Callable[[Tensor, Tensor], list[Tensor]]


def packages(config: pytest.Config, name: str, wanted: tuple[str, ...]) -> Path:
    """Install packages into a directory of pytest's cache, once."""
    directory = config.cache.mkdir("hotop_" + name + "_" + wanted[0].split("==")[1])
    mark = directory / "installed"
    if not mark.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        command += ["--disable-pip-version-check", "--target", str(directory / "site")]
        done = subprocess.run([*command, *wanted], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"{' '.join(wanted)} cannot be had: {done.stderr.strip()[-200:]}")
        mark.touch()
    return directory / "site"


class Oracle:
    """The functions of nvfp4_oracle.cpp on Tensors."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def _map(self, name: str, input: Tensor, dtype: torch.dtype) -> Tensor:
        input = input.contiguous()
        result = torch.empty_like(input, dtype=dtype)
        run = getattr(self._library, name)
        run(_pointer(input), ctypes.c_int64(input.numel()), _pointer(result))
        return result

    def encode(self, format: str, input: Tensor) -> Tensor:
        assert input.dtype == torch.float32
        return self._map(f"encode_{format}", input, torch.uint8)

    def decode(self, format: str, input: Tensor) -> Tensor:
        assert input.dtype == torch.uint8
        return self._map(f"decode_{format}", input, torch.float32)

    def quantize(self, input: Tensor, g: Tensor) -> list[Tensor]:
        x = input.float().contiguous()
        packed = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8)
        sf = torch.empty(*x.shape[:-1], x.shape[-1] // 16, dtype=torch.uint8)
        self._library.quantize(
            _pointer(x),
            ctypes.c_int64(sf.numel()),
            ctypes.c_float(g.item()),
            _pointer(packed),
            _pointer(sf),
        )
        return [packed, sf]

    def dequantize(self, packed: Tensor, sf: Tensor, g: Tensor) -> Tensor:
        packed, sf = packed.contiguous(), sf.contiguous()
        result = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2)
        self._library.dequantize(
            _pointer(packed),
            _pointer(sf),
            ctypes.c_int64(sf.numel()),
            ctypes.c_float(g.item()),
            _pointer(result),
        )
        return result


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.fixture(scope="module")
def oracle(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    if shutil.which("g++") is None:
        pytest.skip("g++ is needed to compile NVIDIA's host code")
    include = packages(pytestconfig, "cuda_headers", HEADERS) / "nvidia" / "cu13" / "include"
    library = tmp_path_factory.mktemp("oracle") / "oracle.so"
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared"]
    command += ["-isystem", str(include), "-isystem", str(include / "cccl")]
    subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
    return Oracle(library)


def compiled_kernels() -> tuple[ModuleType | None, list[str]]:
    try:
        module = importlib.import_module("hotop._nvfp4")
    except ImportError:
        return None, []
    return module, ["quantize", *(f"quantize_{isa}" for isa in module.available_isas())]


KERNELS, NAMES = compiled_kernels()


@pytest.mark.parametrize(("format", "lowest", "highest"), [("e4m3", -12, 10), ("e2m1", -4, 4)])
def test_rounding(oracle: Oracle, format: str, lowest: int, highest: int) -> None:
    codes = torch.arange(127 if format == "e4m3" else 8, dtype=torch.uint8)
    values = oracle.decode(format, codes)
    middles = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([464.0, 480.0, 7.0])])
    input = floats(lowest, highest, middles)
    assert input.numel() > 3_000_000
    ours = {"e4m3": reference._e4m3, "e2m1": reference._e2m1}[format](input)
    assert torch.equal(ours, oracle.encode(format, input))


def test_decoding(oracle: Oracle) -> None:
    """Every pair of a code and a scale, for a few global scales; hotop keeps every zero."""
    packed = torch.arange(256, dtype=torch.uint8).reshape(32, 8).repeat(256, 1)
    sf = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).reshape(-1, 1)
    for value in (1.0, 3.7, 1e-30, 2.5e6, -2.0, math.inf, 0.0):
        g = torch.tensor([value])
        expected = oracle.dequantize(packed, sf, g)
        if value == 0.0:
            unscaled = oracle.dequantize(packed, sf, torch.ones(1))
            expected = torch.where(unscaled == 0, unscaled, expected)
        assert_same_floats(reference.dequantize(packed, sf, g), expected)
        if KERNELS is not None:
            got = KERNELS.dequantize(packed, sf, g, torch.float32, False)
            assert_same_floats(got, expected)


def assert_same_floats(got: Tensor, expected: Tensor) -> None:
    """Bit for bit, -0 too; a NaN equals any NaN (its sign is the processor's)."""
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan].view(torch.int32), expected[~nan].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("data", DATA, ids=lambda data: data.__name__)
@pytest.mark.parametrize("name", ["reference", "quantize", "scalar", "avx2", "avx512"])
def test_rows(
    oracle: Oracle, name: str, data: Callable[[int, int], Tensor], dtype: torch.dtype
) -> None:
    """1.1 million elements a case, 5 global scales each."""
    kernel: Quantize = reference.quantize
    if name != "reference":
        if KERNELS is None:
            pytest.skip("hotop._nvfp4 is not built")
        name = name if name == "quantize" else f"quantize_{name}"
        if name not in NAMES:
            pytest.skip(f"this CPU has no {name.removeprefix('quantize_')}")
        kernel = getattr(KERNELS, name)
    input = data(259, 848).to(dtype)
    finite = input.float().abs().nan_to_num(0.0, 0.0).max().item()
    for value in (1.0, 448 * 6 / finite, 0.3, 2.0**20, 1e-30):
        g = torch.tensor([value])
        packed, sf = kernel(input, g)
        packed_expected, sf_expected = oracle.quantize(input, g)
        assert torch.equal(sf, sf_expected), value
        assert torch.equal(packed, packed_expected), value


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0, -2.0, 1e-45, 3.4e38])
def test_strange_global_scales(oracle: Oracle, value: float) -> None:
    g = torch.tensor([value])
    kernels: list[Quantize] = [reference.quantize, *(getattr(KERNELS, name) for name in NAMES)]
    for data in DATA:
        input = data(64, 256)
        expected = oracle.quantize(input, g)
        for kernel in kernels:
            got = kernel(input, g)
            assert torch.equal(got[1], expected[1]), (kernel, data)
            assert torch.equal(got[0], expected[0]), (kernel, data)


TORCHAO_PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from torchao.prototype.mx_formats.utils import to_blocked
cases, scales = torch.load(sys.argv[2])
torch.save(([[r.view(torch.uint8) for r in nvfp4_quantize(x, 16, 1 / g)] for x, g in cases],
            [to_blocked(sf) for sf in scales]), sys.argv[3])
"""


def torchao_results(
    site: Path, directory: Path, cases: list[tuple[Tensor, Tensor]], scales: list[Tensor]
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """In a process of its own: importing torchao registers operators and writes warnings."""
    torch.save((cases, scales), directory / "in.pt")
    command = [sys.executable, "-c", TORCHAO_PROGRAM, str(site)]
    command += [str(directory / "in.pt"), str(directory / "out.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"torchao does not run beside torch {torch.__version__}: {done.stderr[-300:]}")
    return torch.load(directory / "out.pt")


def test_torchao(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Ordinary data and the swizzle as torchao has them.

    What differs on purpose: torchao divides by 6 where NVIDIA's kernels multiply by float32's 1/6,
    and takes `(1/s) / sf` where we take `1 / (sf * (1/g))`, each within a rounding; and it keeps
    the scale at least 2^-6, so that a block of zeros has a scale, where NVIDIA and we have 0.
    """
    site = packages(pytestconfig, "torchao", TORCHAO)
    x = ordinary(512, 2048)
    exact, general = torch.tensor(2.0**9), 448 * 6 / x.abs().max()
    zeros = torch.zeros(1, 16)
    inputs = [(x, exact), (x.bfloat16(), exact), (x, general), (x.bfloat16(), general)]
    generator = torch.Generator().manual_seed(7)
    shapes = [(128, 4), (1, 1), (130, 5), (300, 12), (257, 33)]
    scales = [torch.randint(0, 256, shape, generator=generator).to(torch.uint8) for shape in shapes]
    results, blocked = torchao_results(site, tmp_path, [*inputs, (zeros, exact)], scales)

    for scale, theirs in zip(scales, blocked, strict=True):
        assert torch.equal(reference.swizzle(scale), theirs)

    for (input, g), (sf, packed) in zip(inputs, results[:-1], strict=True):
        our_packed, our_sf = reference.quantize(input, g)
        sf = sf.reshape(our_sf.shape)
        step = (our_sf.int() - sf.int()).abs()
        assert step.max() <= 1
        assert (step != 0).float().mean() < 1e-3
        same = (step == 0).repeat_interleave(16, dim=1)
        different = (nibbles(our_packed) - nibbles(packed)).abs() * same
        # With a power of two both reciprocals are one rounding of the same number.
        assert different.max() <= (0 if g is exact else 1)
        assert (different != 0).float().mean() < 1e-3

    (floor, packed), (our_packed, our_sf) = results[-1], reference.quantize(zeros, exact)
    assert (our_sf.item(), floor.item()) == (0, 0x08)  # 0x08 is 2^-6
    assert torch.equal(our_packed, packed)


def nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1).int()
