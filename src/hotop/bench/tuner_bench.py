"""What the tuner's look-up adds to a direct call: hits in tables of several sizes, and misses."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

import hotop
from hotop import tuner
from hotop.bench.contenders import HOTOP_NAMESPACE, new_name
from hotop.bench.timing import Timing, make_loop, time_interleaved

__all__ = ["DIRECT", "MISS", "SIZES", "TunerCase", "measure"]

DIRECT = "no tuner"
MISS = "miss"
SIZES = (1, 1_000, 100_000)
_ROUNDS = 400


@dataclass(frozen=True)
class TunerCase:
    """One signature: the call's time without a tuner, with hits, and with a miss."""

    title: str
    timings: dict[str, Timing]

    def added_us(self, contender: str) -> float:
        """Returns what the look-up adds to the direct call."""
        return (self.timings[contender].minimum_ns - self.timings[DIRECT].minimum_ns) / 1e3

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return {
            "title": self.title,
            "timings": {name: asdict(timing) for name, timing in self.timings.items()},
            "added_us": {name: self.added_us(name) for name in self.timings if name != DIRECT},
        }


def _one_tensor(x: Tensor) -> None:
    pass


def _gemm(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = "blas,int8",
) -> None:
    pass


def measure(*, quick: bool = False) -> list[TunerCase]:
    """Times two signatures: one Tensor, and the eight arguments of ``hotop::nvfp4_gemm``."""
    one = [torch.empty(8, 32)]
    eight: list[Any] = [torch.empty(n, dtype=torch.uint8) for n in ((8, 16), (32, 16), 512, 512)]
    eight += [torch.tensor(1.0), torch.bfloat16, False, "blas,int8"]
    rounds = _ROUNDS // 10 if quick else _ROUNDS
    buckets = tuner.power_of_two()
    return [
        _measure("1 Tensor", _one_tensor, one, rounds, {"dims": {"x": {0: buckets}}}),
        _measure(
            "nvfp4_gemm: 5 Tensors, dtype, bool, str",
            _gemm,
            eight,
            rounds,
            {
                "dims": {"act_fp4": {0: buckets}, "act_sf": {0: tuner.follows(lambda _: 512)}},
                "ignore": ["to_userbuffers"],
                "choices": "allowed_backends",
                "default": "blas",
            },
        ),
    ]


def _measure(
    title: str,
    function: Callable[..., None],
    arguments: Sequence[object],
    rounds: int,
    options: dict[str, Any],
) -> TunerCase:
    loops = {DIRECT: make_loop(_op(function), arguments)}
    for size in SIZES:
        loops[f"hit, {size:,} choices"] = make_loop(_op(_tuned(function, size, options)), arguments)
    loops[MISS] = make_loop(_op(_tuned(function, 0, options)), arguments)
    return TunerCase(title, time_interleaved(loops, rounds=rounds))


def _op(function: Callable[..., None]) -> Callable[..., object]:
    return hotop.custom_op(f"{HOTOP_NAMESPACE}::{new_name('tuner')}", function, mutates_args=())


def _tuned(function: Callable[..., None], size: int, options: dict[str, Any]) -> tuner.Tunable:
    """Makes a tunable with `size` choices; one of them is for the bucket of 8 rows."""
    other = {"int8": _twin_of(function)}
    made = hotop.tunable(f"bench::{new_name('tuner')}", tactics=other, **options)(function)
    first = "x" if function is _one_tensor else "act_fp4"
    arguments: dict[str, Any] = {
        "act_fp4": torch.empty(8, 16, dtype=torch.uint8),
        "weight": torch.empty(32, 16, dtype=torch.uint8),
        "act_sf": torch.empty(512, dtype=torch.uint8),
        "weight_scale": torch.empty(512, dtype=torch.uint8),
        "alpha": torch.tensor(1.0),
        "output_dtype": torch.bfloat16,
    }
    if first == "x":
        arguments = {"x": torch.empty(8, 32)}
    described = made._describe((), arguments)
    made._mark_loaded(torch.device("cpu"))
    if described is None:
        raise RuntimeError("the benchmark's call has no key")
    description, device = described
    columns = arguments[first].shape[1]
    dtype = "float32" if first == "x" else "uint8"
    for n in range(size):
        # The other keys differ in the first Tensor's columns.
        own = f"{dtype}[8,{columns + n}]@cpu"
        made._learn([description[0], own, *description[2:]], device, "int8")
    return made


def _twin_of(function: Callable[..., None]) -> Callable[..., None]:
    """Returns another function of the same code, so that only the look-up differs."""
    original = cast(FunctionType, function)
    return FunctionType(
        original.__code__, original.__globals__, original.__name__, original.__defaults__
    )
