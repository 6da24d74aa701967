"""The speeds that hotop sets out to reach for ops that exist, beside what was measured."""

from hotop.bench.existing import ExistingResult
from hotop.bench.existing_aten import FUNCTION, MODES
from hotop.bench.existing_ops import (
    ACCELERATED,
    CUSTOM_OP,
    DEFINE_IMPL,
    LOOKED_UP,
    MANY,
    ONE,
    TODAY,
)
from hotop.bench.targets import Target

__all__ = ["existing_targets"]

# The most that the accelerated tax may be, in us, by registration and signature.
_TAXES_US = {(DEFINE_IMPL, ONE): 0.25, (DEFINE_IMPL, MANY): 0.4, (CUSTOM_OP, ONE): 0.2}
_OF_FUNCTION = 1.0
_OF_OVERLOAD = 1.6
_OF_STEP = 1.2
_OF_IMPORT = 1.1


def existing_targets(result: ExistingResult) -> list[Target]:
    """Lists the targets for which `result` has the numbers; ratios are of whole calls."""
    found = [
        Target(
            f"{row.registration}, {row.inputs}, by {way}: tax",
            row.tax_us(way, ACCELERATED),
            "at most",
            limit,
            "us",
        )
        for row in result.ops
        if (limit := _TAXES_US.get((row.registration, row.inputs))) is not None
        for way in row.ways
        # Its own price, the two look-ups, is no part of the call.
        if way != LOOKED_UP
    ]
    for mode in MODES:
        of = f"{mode}, geometric mean"
        found += [
            Target(
                f"ATen, {of}: accelerated / torch function",
                result.aten_ratio(mode, ACCELERATED, FUNCTION),
                "at most",
                _OF_FUNCTION,
                "times",
            ),
            Target(
                f"ATen, {of}: overload today / accelerated",
                result.aten_ratio(mode, TODAY, ACCELERATED),
                "at least",
                _OF_OVERLOAD,
                "times",
            ),
        ]
    found += [
        Target(
            f"{row.name} exported, {row.mode}: step today / accelerated",
            row.speedup(),
            "at least",
            _OF_STEP,
            "times",
        )
        for row in result.models
    ]
    found += [
        Target(
            f"import of {row.ops} ops, {row.registration}: after install() / plain",
            row.ratio(),
            "at most",
            _OF_IMPORT,
            "times",
        )
        for row in result.imports
    ]
    return found
