"""The C++ kernels that quantize to NVFP4: golden cases, every instruction set bit for bit."""

import ctypes
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

kernels = pytest.importorskip("hotop._nvfp4")

SOURCES = Path(__file__).parent.parent / "csrc" / "nvfp4"
GOLDEN = json.loads((Path(__file__).parent / "data" / "nvfp4_golden.json").read_text())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan
GLOBAL_SCALES = [1.0, 300.0, 1e-3, 0.0, -0.0, -5.0, INF, -INF, NAN, 1e-40, 1e-45, 3e38, 1e20, 1e-20]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)


def quantizers():
    return [getattr(kernels, f"quantize_{isa}") for isa in kernels.available_isas()]


# The emulated AVX-512 kernels: quantize_avx512.cpp built for AVX2, called through ctypes.
SHIM = """
#include "kernels.h"
using namespace hotop::nvfp4;
extern "C" void quantize(int type, const void* input, long rows, long blocks, float g,
                         unsigned char* packed, unsigned char* scales, int swizzled) {
  QuantizeJob job{input, blocks * 16, blocks, g, packed, scales, swizzled != 0};
  kAvx512Kernels->quantize[type](job, 0, rows);
}
"""


@pytest.fixture(scope="session")
def emulated_avx512(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None or "avx2" not in kernels.available_isas():
        pytest.skip("emulating AVX-512 needs g++ and a CPU with AVX2")
    folder = tmp_path_factory.mktemp("avx512")
    (folder / "shim.cpp").write_text(SHIM)
    names = ("quantize_avx512.cpp", "gemm_avx2.cpp", "scalar.cpp")
    command = [compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c"]
    command += ["-DHOTOP_NVFP4_EMULATE_AVX512", "-Wno-psabi", "-shared", "-fPIC", f"-I{SOURCES}"]
    command += [str(SOURCES / name) for name in names]
    built = subprocess.run(
        [*command, str(folder / "shim.cpp"), "-o", str(folder / "shim.so")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    library = ctypes.CDLL(str(folder / "shim.so"))

    def quantize(x: Tensor, g: Tensor, size: int = 16, swizzled: bool = False) -> list[Tensor]:
        packed, scales = kernels.quantize_trivial(x, g, size, swizzled)
        rows, blocks = x.numel() // x.shape[-1], x.shape[-1] // 16
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, packed, scales)]
        library.quantize(
            DTYPES.index(x.dtype),
            pointers[0],
            ctypes.c_long(rows),
            ctypes.c_long(blocks),
            ctypes.c_float(g.item()),
            *pointers[1:],
            int(swizzled),
        )
        return [packed, scales]

    return quantize


def golden_input(case: dict) -> Tensor:
    if isinstance(case["x_bf16_bits"], list):
        bits = [[int(word, 16) for word in row] for row in case["x_bf16_bits"]]
        return from_bits(torch.tensor(bits), torch.bfloat16)
    i = torch.arange(case["shape"][0], dtype=torch.float64)[:, None]
    j = torch.arange(case["shape"][1], dtype=torch.float64)[None]
    return ((((37 * i + 101 * j) % 257) - 128) / 16 * (1 + i % 5)).to(torch.bfloat16)


def check_golden(quantize, name: str, dtype: torch.dtype) -> None:
    case = GOLDEN[name]
    x = golden_input(case).to(dtype)
    g = from_bits(torch.tensor(int(case["g_f32_bits"], 16)), torch.float32)
    packed, linear = quantize(x, g)
    assert bytes(packed.flatten().tolist()).hex() == case["packed"]
    assert bytes(linear.flatten().tolist()).hex() == case["sf_linear"]
    packed, swizzled = quantize(x, g, 16, True)
    assert bytes(packed.flatten().tolist()).hex() == case["packed"]
    assert swizzled.shape == (case["sf_swizzled_len"],)
    assert hashlib.sha256(bytes(swizzled.tolist())).hexdigest() == case["sf_swizzled_sha256"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_cases(name, dtype):
    for quantize in [kernels.quantize, *quantizers()]:
        check_golden(quantize, name, dtype)


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_cases_with_emulated_avx512(emulated_avx512, name):
    check_golden(emulated_avx512, name, torch.bfloat16)


def assert_same_bits(x: Tensor, g: Tensor, others: list) -> None:
    for swizzled in (False, True):
        expected = kernels.quantize_scalar(x, g, 16, swizzled)
        for quantize in others:
            got = quantize(x, g, 16, swizzled)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])


def check_all_bits(g: float, others: list) -> None:
    """All 16-bit patterns in order and mixed, random 32-bit patterns, many magnitudes."""
    generator = torch.Generator().manual_seed(1)
    every = torch.arange(1 << 16)
    mixed = torch.randperm(1 << 16, generator=generator)
    for dtype in (torch.bfloat16, torch.float16):
        for bits in (every, mixed):
            assert_same_bits(from_bits(bits, dtype).view(-1, 64), scalar(g), others)
    words = torch.randint(-(2**31), 2**31, (1 << 17,), generator=generator)
    assert_same_bits(from_bits(words, torch.float32).view(-1, 256), scalar(g), others)
    for exponent in range(-40, 40, 8):
        x = torch.randn(8, 272, generator=generator) * 10.0**exponent
        for dtype in DTYPES:
            assert_same_bits(x.to(dtype), scalar(g), others)


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_every_instruction_set_has_the_scalar_bits(g):
    check_all_bits(g, quantizers()[1:])


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_emulated_avx512_has_the_scalar_bits(emulated_avx512, g):
    check_all_bits(g, [emulated_avx512])


def test_every_code_boundary_has_the_scalar_bits(emulated_avx512):
    # A block with 6 as its greatest and g = 1 has scale 1: each value is rounded as it stands.
    edges = torch.tensor([0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).view(torch.int32)
    near = (edges[:, None] + torch.arange(-40, 41, dtype=torch.int32)).view(torch.float32)
    values = torch.cat([near.flatten(), -near.flatten()])
    values = values.minimum(scalar(6.0)).maximum(scalar(-6.0))[: values.numel() // 15 * 15]
    x = torch.cat([values.view(-1, 15), torch.full((values.numel() // 15, 1), 6.0)], 1)
    assert_same_bits(x, scalar(1.0), [*quantizers()[1:], emulated_avx512])
    packed, scales = kernels.quantize(x, scalar(1.0))
    assert scales.unique().tolist() == [0x38]
    assert sorted((packed & 7).unique().tolist()) == list(range(8))


@pytest.mark.parametrize("blocks", [*range(1, 10), 16, 17, 18, 19])
@pytest.mark.parametrize("rows", [1, 3, 33, 129])
def test_odd_shapes_have_the_scalar_bits(emulated_avx512, rows, blocks):
    x = torch.randn(rows, blocks * 16, generator=torch.Generator().manual_seed(2))
    for dtype in DTYPES:
        assert_same_bits(x.to(dtype), scalar(500.0), [*quantizers()[1:], emulated_avx512])


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 0), (2, 0, 16), (16,), (2, 3, 4, 48)])
@pytest.mark.parametrize("swizzled", [False, True])
def test_shapes_of_results(shape, swizzled):
    rows, blocks = math.prod(shape[:-1]), shape[-1] // 16
    for quantize in [*quantizers(), kernels.quantize_trivial]:
        packed, scales = quantize(torch.ones(shape), scalar(1.0), 16, swizzled)
        assert packed.shape == (*shape[:-1], shape[-1] // 2)
        padded = (-(-rows // 128) * 128 * (-(-blocks // 4)) * 4,)
        assert scales.shape == (padded if swizzled else (*shape[:-1], blocks))
        assert packed.dtype == scales.dtype == torch.uint8


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: x[::3],
        lambda x: x[:, 16:80],
        lambda x: x[3:, 32:],
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(5, 96),
        lambda x: x.view(4, 6, 96).transpose(0, 1),
        lambda x: x.view(4, 6, 96)[:, 2:4],
        lambda x: x.as_strided((7, 32), (16, 1), 5),
    ],
)
def test_strides_and_offsets(view):
    base = torch.randn(24, 96, generator=torch.Generator().manual_seed(3))
    for dtype in DTYPES:
        x = view(base.to(dtype))
        for quantize in quantizers():
            for swizzled in (False, True):
                got = quantize(x, scalar(9.0), 16, swizzled)
                expected = quantize(
                    x.clone(memory_format=torch.contiguous_format), scalar(9.0), 16, swizzled
                )
                assert all(map(torch.equal, got, expected))


def test_large_inputs_do_not_depend_on_threads_nor_on_flushed_subnormals():
    x = torch.randn(300, 1040, generator=torch.Generator().manual_seed(4)) * 1e-38
    g, before = scalar(1e38), torch.get_num_threads()
    expected = kernels.quantize_scalar(x, g, 16, True)
    assert expected[1].unique().numel() > 20
    try:
        for threads in (1, 2):
            for flush in (False, True):
                torch.set_num_threads(threads)
                torch.set_flush_denormal(flush)
                for quantize in quantizers():
                    assert all(map(torch.equal, quantize(x, g, 16, True), expected))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def test_swizzle_and_back():
    for rows, columns in [(1, 1), (130, 5), (128, 4), (33, 7), (257, 12), (0, 4), (4, 0)]:
        sf = torch.arange(rows * columns).remainder(251).add(1).to(torch.uint8).view(rows, columns)
        flat = kernels.swizzle(sf)
        assert flat.shape == (-(-rows // 128) * 128 * (-(-columns // 4)) * 4,)
        assert torch.equal(kernels.unswizzle(flat, rows, columns), sf)
        assert int((flat != 0).sum()) == rows * columns
        for r, c in [(0, 0), (rows - 1, columns - 1)] if rows * columns else []:
            tiles = -(-columns // 4)
            offset = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4
            assert flat[offset + c % 4] == sf[r, c]
    strided = torch.arange(64, dtype=torch.uint8).view(8, 8).t()
    assert torch.equal(kernels.unswizzle(kernels.swizzle(strided), 8, 8), strided)


def test_missing_instruction_sets_say_so():
    missing = {"scalar", "avx2", "avx512"} - set(kernels.available_isas())
    for name in missing:
        with pytest.raises(RuntimeError, match=name):
            kernels.set_isa(name)
        if name != "scalar":
            with pytest.raises(RuntimeError, match=name):
                getattr(kernels, f"quantize_{name}")(torch.ones(16), scalar(1.0))
    assert kernels.isa() in kernels.available_isas()
    if platform.machine() != "x86_64":
        assert kernels.available_isas() == ["scalar"]


@pytest.mark.parametrize("name", ["scalar", "sse9"])
def test_environment_variable(name):
    code = "from hotop import _nvfp4; print(_nvfp4.isa())"
    environment = os.environ | {"HOTOP_NVFP4_ISA": name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if name == "scalar":
        assert done.stdout.strip() == "scalar", done.stderr
    else:
        assert done.returncode != 0
        assert "ImportError: hotop._nvfp4: unknown instruction set 'sse9'" in done.stderr
