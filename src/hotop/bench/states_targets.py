"""The speeds that hotop sets out to reach in each state of a program, beside what was measured."""

from hotop.bench.contenders import CUSTOM_OP, HOTOP
from hotop.bench.states import (
    ACTIVATIONS,
    AUTOCAST,
    BACKWARD,
    COUNTS,
    FAKE,
    FORWARD,
    FUNCTIONAL_MODE,
    FUNCTIONALIZED,
    PROFILED,
    VMAP,
    StatesResult,
)
from hotop.bench.states_ops import ATEN, FUNCTION
from hotop.bench.targets import Target

__all__ = ["states_targets"]

_FORWARD_US = 1.0
_BACKWARD_OF_FUNCTION = 0.9
_BACKWARD_OF_CUSTOM_OP = 0.55
_ARGUMENT_US = 0.1
_PROFILED_US = 0.5
# No slower than custom_op: two minima of the same code differ by a few percent.
_NO_SLOWER = 1.05


def states_targets(result: StatesResult) -> list[Target]:
    """Lists the targets; ratios are of whole calls, the kernel included."""
    both, profiled = result.row(BACKWARD), result.row(PROFILED)
    least, most = COUNTS[0], COUNTS[-1]
    over_aten = profiled.tax_us(HOTOP) - profiled.tax_us(ATEN)
    slope = result.slope_us(ACTIVATIONS, HOTOP, least, most)

    def times(title: str, measured: float, limit: float) -> Target:
        return Target(title, measured, "at most", limit, "times")

    return [
        Target(f"{FORWARD}: tax", result.row(FORWARD).tax_us(HOTOP), "at most", _FORWARD_US, "us"),
        times(
            f"{BACKWARD}: hotop / autograd.Function",
            both.ratio(HOTOP, FUNCTION),
            _BACKWARD_OF_FUNCTION,
        ),
        times(
            f"{BACKWARD}: hotop / custom_op", both.ratio(HOTOP, CUSTOM_OP), _BACKWARD_OF_CUSTOM_OP
        ),
        Target(
            f"{FORWARD}: each further of {least} to {most} {ACTIVATIONS}",
            slope,
            "at most",
            _ARGUMENT_US,
            "us",
        ),
        Target(f"{PROFILED}: over PyTorch's own op", over_aten, "at most", _PROFILED_US, "us"),
        *(
            times(
                f"{state}: hotop / custom_op",
                result.row(state).ratio(HOTOP, CUSTOM_OP),
                _NO_SLOWER,
            )
            for state in (AUTOCAST, VMAP, FUNCTIONALIZED, FUNCTIONAL_MODE, FAKE)
        ),
    ]
