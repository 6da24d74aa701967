"""The speeds hotop sets out to reach, beside what was measured; informational, never a verdict."""

from dataclasses import asdict, dataclass

from hotop.bench.contenders import CUSTOM_OP, DEFINE_IMPL, HOTOP, HOTOP_PACKET, LOOKUPS
from hotop.bench.nvfp4_bench import GEMM_SHAPES, QUANTIZE_SHAPES, NVFP4Result
from hotop.bench.population_bench import PopulationResult
from hotop.bench.suite import SuiteResult, tax_us
from hotop.bench.tuner_bench import DIRECT, MISS, TunerCase

__all__ = ["Target", "nvfp4_targets", "population_targets", "suite_targets", "tuner_targets"]

# Case, the most that hotop's tax may be in us, the least that custom_op / hotop may be.
_CASE_LIMITS = (
    ("tensors-1", 0.10, 120),
    ("tensors-10", 0.15, 100),
    ("tensors-30", 0.25, 90),
    ("mixed", 0.20, 70),
    ("mutated", 0.10, 120),
    ("keywords", 0.15, 80),
)
_PACKET_RATIO = 80
_DEFINE_IMPL_RATIO = 15
_COMPILED_US = 0.15
_SLOPE_NS = 6
_TUNER_HIT_US = 0.15
_QUANTIZE_RATE = 1.5
_QUANTIZE_RATIO = 30
_GEMM_RATIO = 0.9
# Two minima of the same code differ by a few ns; used where the limit is itself measured.
_NOISE_US = 0.01
_SMALLEST_TAX_US = 0.001
_PACKET_PARTS = (HOTOP, CUSTOM_OP, DEFINE_IMPL, LOOKUPS)


@dataclass(frozen=True, slots=True)
class Target:
    """One measured number against its limit."""

    title: str
    measured: float
    relation: str
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether the measured number keeps the limit."""
        if self.relation == "at most":
            return self.measured <= self.limit
        return self.measured >= self.limit

    def as_json(self) -> dict[str, object]:
        """Returns plain data, the verdict included."""
        return asdict(self) | {"met": self.met}


def suite_targets(result: SuiteResult) -> list[Target]:
    """Lists the targets for which `result` has the numbers."""
    targets: list[Target] = []
    for name, limit_us, least_ratio in _CASE_LIMITS:
        if (case := result.case(name)) is None:
            continue
        tax = tax_us(case.timings, HOTOP)
        ratio = tax_us(case.timings, CUSTOM_OP) / max(tax, _SMALLEST_TAX_US)
        targets.append(Target(f"{case.title}: tax", tax, "at most", limit_us, "us"))
        targets.append(
            Target(f"{case.title}: custom_op / hotop", ratio, "at least", least_ratio, "x")
        )
    if (case := result.case("tensors-1")) is not None:
        taxes = {name: tax_us(case.timings, name) for name in (*_PACKET_PARTS, HOTOP_PACKET)}
        packet = taxes[HOTOP_PACKET]
        smallest = _SMALLEST_TAX_US
        targets += [
            Target(
                "torch.ops.ns.op(x): tax; object + look-ups + 0.01 us of noise",
                packet,
                "at most",
                taxes[HOTOP] + taxes[LOOKUPS] + _NOISE_US,
                "us",
            ),
            Target(
                "torch.ops.ns.op(x): custom_op / hotop, look-ups included",
                taxes[CUSTOM_OP] / max(packet, smallest),
                "at least",
                _PACKET_RATIO,
                "x",
            ),
            Target(
                "torch.ops.ns.op(x): custom_op / hotop, look-ups taken off",
                taxes[CUSTOM_OP] / max(packet - taxes[LOOKUPS], smallest),
                "at least",
                _PACKET_RATIO,
                "x",
            ),
            Target(
                "1 Tensor: define + impl / hotop",
                taxes[DEFINE_IMPL] / max(taxes[HOTOP], smallest),
                "at least",
                _DEFINE_IMPL_RATIO,
                "x",
            ),
        ]
    targets += [
        Target(
            f"{row.title}: over the bare function",
            row.taxes_us()[HOTOP],
            "at most",
            _COMPILED_US,
            "us",
        )
        for row in result.compiled
        if row.tensors == 1
    ]
    if slopes := result.slopes_ns():
        targets += [
            Target(f"each further Tensor, {span}", slope[HOTOP], "at most", _SLOPE_NS, "ns")
            for span, slope in slopes.items()
        ]
    if (case := result.case("clone")) is not None:
        targets.append(
            Target(
                "kernel x.clone(): over the plain function; 0.01 us of noise",
                tax_us(case.timings, HOTOP),
                "at most",
                _NOISE_US,
                "us",
            )
        )
    if (row := result.registration) is not None:
        targets.append(
            Target(
                "registration per op; limit is torch.library.custom_op's",
                row.minimum_ms[HOTOP],
                "at most",
                row.minimum_ms[CUSTOM_OP],
                "ms",
            )
        )
    return targets


def population_targets(result: PopulationResult) -> list[Target]:
    """Lists the targets over the population."""
    taxes = result.taxes(HOTOP)
    if not taxes:
        return []
    middle = result.distribution(HOTOP)
    return [
        Target("median op: tax", middle["median"], "at most", 0.15, "us"),
        Target("worst op: tax", middle["max"], "at most", 0.6, "us"),
        Target(
            "geometric mean of custom_op / hotop",
            result.geometric_mean_ratio(CUSTOM_OP),
            "at least",
            90,
            "x",
        ),
        Target(
            "geometric mean of define + impl / hotop",
            result.geometric_mean_ratio(DEFINE_IMPL),
            "at least",
            18,
            "x",
        ),
        Target(
            "ops on the direct road",
            float(sum(op.direct for op in result.ops)),
            "at least",
            float(len(result.ops) + len(result.failures)),
            "ops",
        ),
    ]


def tuner_targets(cases: list[TunerCase]) -> list[Target]:
    """Lists what a hit may add to a direct call, in every table."""
    return [
        Target(f"{case.title}: {name}", case.added_us(name), "at most", _TUNER_HIT_US, "us")
        for case in cases
        for name in case.timings
        if name not in (DIRECT, MISS)
    ]


def nvfp4_targets(result: NVFP4Result) -> list[Target]:
    """Lists the speeds that the kernels have to reach."""
    large, small = QUANTIZE_SHAPES[:2]
    rows = result.find("quantize", large, 1)
    isa = "avx2" if rows and "avx2" in rows[0].timings else "default"
    found = [
        Target(
            f"quantize {large}, {row.dtype}, {isa}, 1 thread",
            row.rate(isa),
            "at least",
            _QUANTIZE_RATE,
            "G/s",
        )
        for row in rows
    ]
    found += [
        Target(
            f"quantize {small}, {row.dtype}: PyTorch / default",
            row.ratio("default"),
            "at least",
            _QUANTIZE_RATIO,
            "x",
        )
        for row in result.find("quantize", small, 1)
    ]
    found += [
        Target(
            f"gemm {row.shape}, {row.threads} thread(s): F.linear / default",
            row.ratio("default"),
            "at least",
            _GEMM_RATIO,
            "x",
        )
        for row in result.rows
        if row.op == "gemm" and row.shape == GEMM_SHAPES[0]
    ]
    return found
