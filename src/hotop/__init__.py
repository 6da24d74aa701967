"""PyTorch operators at the price of a function call."""

import sys as _sys

# isort: off  (these two come before torch: one may leave, the other refuses a subinterpreter)
from hotop import (
    _interpreter,  # noqa: F401
    _leave_early,  # noqa: F401
)

# isort: on
from hotop._define import custom_op
from hotop._explain import Explanation, explain, is_native
from hotop._fast_custom_op import fast_custom_op
from hotop._report import OpReport, Report, report
from hotop._switches import Installation, accelerate, install, restore, uninstall
from hotop.tuner import tunable, tuning

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "Installation",
    "OpReport",
    "Report",
    "__version__",
    "accelerate",
    "custom_op",
    "explain",
    "fast_custom_op",
    "install",
    "is_native",
    "report",
    "restore",
    "tunable",
    "tuning",
    "uninstall",
]

# A program that imports hotop first reached the entry point of HOTOP=1 while this was half done.
_autoload = _sys.modules.get("hotop_autoload")
if _autoload is not None:
    _autoload.start()
