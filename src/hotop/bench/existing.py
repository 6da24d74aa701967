"""What acceleration does for ops that exist: registered ops, ATen, exported models, imports."""

from collections.abc import Callable
from dataclasses import dataclass

from hotop.bench.existing_aten import AtenRow, geometric_mean_ratio, measure_aten
from hotop.bench.existing_import import ImportRow, measure_imports
from hotop.bench.existing_models import ModelRow, make_models, measure_models, missing_packages
from hotop.bench.existing_ops import OpRow, measure_ops
from hotop.bench.timing import one_torch_thread

__all__ = ["ExistingResult", "measure"]

_STEPS = 4


@dataclass(frozen=True)
class ExistingResult:
    """All that ``bench --existing`` measures.

    Attributes:
        ops: Ops of ``define + impl`` and ``custom_op`` whose kernel does nothing.
        aten: Calls of PyTorch's own operators, by mode.
        models: Exported models, by mode.
        imports: Imports of generated packages.
        missing: The packages for the models that are not installed: no models then.
    """

    ops: list[OpRow]
    aten: list[AtenRow]
    models: list[ModelRow]
    imports: list[ImportRow]
    missing: list[str]

    def aten_ratio(self, mode: str, contender: str, other: str) -> float:
        """Returns the geometric mean over a mode's calls of one contender's over another's."""
        rows = [row for row in self.aten if row.mode == mode]
        return geometric_mean_ratio(rows, contender, other)

    def failures(self) -> list[str]:
        """Returns what must not be: a program whose bits acceleration changed."""
        return [
            f"{row.name}, {row.mode}: the accelerated program's outputs differ"
            for row in self.models
            if not row.equal
        ]

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return {
            "ops": [row.as_json() for row in self.ops],
            "aten": [row.as_json() for row in self.aten],
            "models": [row.as_json() for row in self.models],
            "imports": [row.as_json() for row in self.imports],
            "missing": self.missing,
            "failures": self.failures(),
        }


def measure(
    *,
    quick: bool = False,
    on_step: Callable[[str, int, int], None] = lambda title, step, steps: None,
) -> ExistingResult:
    """Measures registered ops, PyTorch's operators, exported models and imports, in this order.

    Everything that is accelerated for the measurement and is not the measurement's own is restored.
    """

    def at(step: int) -> Callable[[str], None]:
        return lambda title: on_step(title, step, _STEPS)

    missing = missing_packages()
    with one_torch_thread():
        at(0)("ops of define + impl and of custom_op")
        ops = measure_ops(quick=quick)
        aten = measure_aten(quick=quick, on_call=at(1))
        models: list[ModelRow] = []
        if not missing:
            at(2)("making the models")
            models = measure_models(make_models(quick=quick), quick=quick, on_model=at(2))
        imports = measure_imports(quick=quick, on_round=at(3))
    return ExistingResult(ops, aten, models, imports, missing)
