"""How fast the NVFP4 kernels are: quantize against plain PyTorch, GEMM against float32 F.linear."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hotop.bench.timing import Timing, make_loop, time_interleaved

__all__ = ["GEMM_SHAPES", "QUANTIZE_SHAPES", "KernelRow", "NVFP4Result", "measure"]

QUANTIZE_SHAPES = ((1024, 4096), (32, 256), (8, 32))
# m, n, k
GEMM_SHAPES = ((256, 2048, 2048), (16, 2048, 2048), (1, 2048, 2048), (8, 32, 32))
LINEAR = "F.linear, float32"
PYTORCH = "PyTorch"


@dataclass(frozen=True)
class KernelRow:
    """One shape: the time of each contender.

    Attributes:
        op: ``"quantize"`` or ``"gemm"``.
        shape: Rows and columns, or m, n and k.
        dtype: Of the input, or of the output.
        threads: PyTorch's threads while it was measured.
        timings: By kernel; `PYTORCH` or `LINEAR` is what they are compared with.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    threads: int
    timings: dict[str, Timing]

    def rate(self, contender: str) -> float:
        """Returns G elements/s, or GFLOP/s."""
        work = 1 if self.op == "quantize" else 2
        for size in self.shape:
            work *= size
        return work / self.timings[contender].minimum_ns

    def ratio(self, contender: str) -> float:
        """Returns how many times faster than PyTorch's way a kernel is."""
        base = self.timings[PYTORCH if self.op == "quantize" else LINEAR].minimum_ns
        return base / self.timings[contender].minimum_ns

    def as_json(self) -> dict[str, object]:
        """Returns plain data, with the rates."""
        return asdict(self) | {"rate": {name: self.rate(name) for name in self.timings}}


@dataclass(frozen=True)
class NVFP4Result:
    """All rows, and the instruction set that the default kernels used."""

    isa: str
    rows: list[KernelRow]

    def find(self, op: str, shape: tuple[int, ...], threads: int) -> list[KernelRow]:
        """Returns the rows of one shape."""
        return [
            row for row in self.rows if (row.op, row.shape, row.threads) == (op, shape, threads)
        ]


def measure(*, quick: bool = False) -> NVFP4Result:
    """Times every kernel that this machine can run."""
    from hotop.nvfp4._ops import kernels

    rounds = 5 if quick else 60
    everything = torch.get_num_threads()
    rows = []
    for threads in sorted({1, everything}):
        with _threads(threads):
            for shape in QUANTIZE_SHAPES:
                # One thread is what the goal is about; dtypes differ only in how they are read.
                dtypes = _DTYPES if threads == 1 and not quick else _DTYPES[:1]
                rows += [_quantize(kernels, shape, dtype, threads, rounds) for dtype in dtypes]
            rows += [_gemm(kernels, shape, threads, rounds) for shape in GEMM_SHAPES]
    return NVFP4Result(kernels.isa(), rows)


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _quantize(
    kernels: Any, shape: tuple[int, int], dtype: torch.dtype, threads: int, rounds: int
) -> KernelRow:
    from hotop.nvfp4 import reference

    x, g = torch.randn(shape, dtype=dtype), torch.tensor(500.0)
    functions: dict[str, Callable[..., Any]] = {
        PYTORCH: lambda: reference.quantize(x, g, True),
        "default": lambda: kernels.quantize(x, g, 16, True),
        **{
            isa: _bound(getattr(kernels, f"quantize_{isa}"), x, g, 16, True)
            for isa in kernels.available_isas()
        },
    }
    return _row("quantize", shape, dtype, threads, functions, rounds)


def _gemm(kernels: Any, shape: tuple[int, int, int], threads: int, rounds: int) -> KernelRow:
    m, n, k = shape
    x, weight, g = torch.randn(m, k), torch.randn(n, k), torch.tensor(500.0)
    act, act_sf = kernels.quantize(x, g, 16, True)
    packed, weight_sf = kernels.quantize(weight, g, 16, True)
    arguments = (act, packed, act_sf, weight_sf, 1 / (g * g), torch.float32)
    functions: dict[str, Callable[..., Any]] = {
        LINEAR: lambda: torch.nn.functional.linear(x, weight),
        "default": _bound(kernels.gemm, *arguments),
        "blas": _bound(kernels.gemm_blas, *arguments),
        "int8": _bound(kernels.gemm_int8, *arguments),
    }
    return _row("gemm", shape, torch.float32, threads, functions, rounds)


def _bound(function: Callable[..., Any], *arguments: object) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _row(
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    threads: int,
    functions: dict[str, Callable[[], Any]],
    rounds: int,
) -> KernelRow:
    loops = {name: make_loop(function, []) for name, function in functions.items()}
    with torch.inference_mode():
        timings = time_interleaved(loops, rounds=rounds, context=torch.inference_mode)
    return KernelRow(op, shape, str(dtype).removeprefix("torch."), threads, timings)
