"""What `hotop.install()` adds to the import of a package that defines a hundred ops."""

import json
import py_compile
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hotop.bench.existing_ops import CUSTOM_OP, DEFINE_IMPL

__all__ = ["INSTALLED", "PLAIN_IMPORT", "ImportRow", "make_package", "measure_imports"]

PLAIN_IMPORT = "plain"
INSTALLED = "installed"
_OPS = 100
_ROUNDS = 6

_REGISTER = {
    CUSTOM_OP: """
def register(name, function, fake):
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=())(function)
    op.register_fake(fake)
""",
    DEFINE_IMPL: """
library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(name, function, fake):
    library.define(name + torch.library.infer_schema(function, mutates_args=()))
    library.impl(name, function, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
""",
}

_OP = """

def op_{n}(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * weight + eps


def fake_{n}(x, weight, eps=1e-6):
    return torch.empty_like(x)


register("op_{n}", op_{n}, fake_{n})
"""

# torch and hotop are imported before: a process that installs has both, and they take seconds.
# The process's own clock: a shared machine interrupts what takes this long. And the garbage of
# before is collected first: a full collection takes longer than the import, and in which import one
# falls depends on every object made until then.
_PROGRAM = """
import gc, json, sys, time
import torch, hotop
folder, module, install = sys.argv[1:]
sys.path.insert(0, folder)
begin = time.process_time()
if install == "installed":
    hotop.install()
installed = time.process_time()
gc.collect()
start = time.process_time()
__import__(module)
end = time.process_time()
print(json.dumps([(end - start) * 1e3, (installed - begin) * 1e3]))
"""


@dataclass(frozen=True)
class ImportRow:
    """One generated package, imported in fresh processes.

    Attributes:
        registration: How it makes its ops.
        ops: How many it makes.
        import_ms: Milliseconds of CPU time of each import, plain and after ``hotop.install()``.
        install_ms: Milliseconds that each ``hotop.install()`` itself took.
    """

    registration: str
    ops: int
    import_ms: dict[str, list[float]]
    install_ms: list[float]

    def minimum_ms(self, contender: str) -> float:
        """Returns the fastest import."""
        return min(self.import_ms[contender])

    def median_ms(self, contender: str) -> float:
        """Returns the median import."""
        return statistics.median(self.import_ms[contender])

    def ratio(self) -> float:
        """Returns the fastest import after ``install()`` as a multiple of the plain one."""
        return self.minimum_ms(INSTALLED) / self.minimum_ms(PLAIN_IMPORT)

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return asdict(self) | {"ratio": self.ratio()}


def make_package(registration: str, ops: int, namespace: str) -> str:
    """Returns the text of a module that defines `ops` ops with fake implementations."""
    head = f'import torch\n\nNAMESPACE = "{namespace}"\n{_REGISTER[registration]}'
    return head + "".join(_OP.format(n=n) for n in range(ops))


def measure_imports(
    *, quick: bool = False, on_round: Callable[[str], None] = lambda title: None
) -> list[ImportRow]:
    """Imports each package in fresh processes, plain and after ``hotop.install()`` in turn."""
    ops, rounds = (_OPS // 10, 1) if quick else (_OPS, _ROUNDS)
    with TemporaryDirectory() as name:
        folder = Path(name)
        modules = {}
        for serial, registration in enumerate(_REGISTER):
            modules[registration] = f"hotop_bench_package_{serial}"
            text = make_package(registration, ops, modules[registration])
            file = folder / f"{modules[registration]}.py"
            file.write_text(text, encoding="utf-8")
            py_compile.compile(str(file), doraise=True)
        rows = {
            registration: ImportRow(registration, ops, {PLAIN_IMPORT: [], INSTALLED: []}, [])
            for registration in modules
        }
        for registration, module in modules.items():
            for turn in range(rounds):
                on_round(f"import of {ops} ops, {registration}, {turn + 1} of {rounds}")
                for contender in (PLAIN_IMPORT, INSTALLED):
                    import_ms, install_ms = _import(folder, module, contender)
                    rows[registration].import_ms[contender].append(import_ms)
                    if contender == INSTALLED:
                        rows[registration].install_ms.append(install_ms)
    return list(rows.values())


def _import(folder: Path, module: str, contender: str) -> tuple[float, float]:
    command = [sys.executable, "-c", _PROGRAM, str(folder), module, contender]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the import of {module} failed ({contender}):\n{done.stderr}")
    import_ms, install_ms = json.loads(done.stdout)
    return import_ms, install_ms
