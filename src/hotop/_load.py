"""Decide whether the C++ core fits this process, and say in one sentence when it does not."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import warnings
from types import ModuleType

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps <hotop source>"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _mismatch(torch_version: str) -> str | None:
    """Compare the stamp beside the core with this process, before the core is loaded.

    A core built for another PyTorch loads without complaint and corrupts memory.
    """
    try:
        stamp = importlib.import_module("hotop._stamp")
    except ImportError:
        return f"hotop's C++ core was not built; build it with: {REBUILD}"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if _minor(stamp.TORCH) != _minor(torch_version):
        return (
            f"hotop's C++ core was built for PyTorch {stamp.TORCH} but this is PyTorch "
            f"{torch_version}; rebuild it with: {REBUILD}"
        )
    if sysconfig.get_config_var("SOABI") != stamp.SOABI:
        return (
            f"hotop's C++ core was built for Python {stamp.PYTHON} ({stamp.SOABI}) but this is "
            f"Python {python} ({sysconfig.get_config_var('SOABI')}); rebuild it with: {REBUILD}"
        )
    return None


def load_core() -> tuple[ModuleType | None, str]:
    """Return the core, or None and the sentence that says why not."""
    import torch  # the core links against libraries that torch has loaded

    if os.environ.get("HOTOP_DISABLE", "0") not in ("", "0"):
        return None, "hotop is switched off by HOTOP_DISABLE"
    problem = _mismatch(torch.__version__)
    if problem is not None:
        return None, problem
    try:
        return importlib.import_module("hotop._core"), ""
    except ImportError as error:
        return None, f"hotop's C++ core cannot be loaded ({error}); rebuild it with: {REBUILD}"


def load_extension(name: str) -> ModuleType:
    """Return one of hotop's other C++ modules, which HOTOP_DISABLE does not concern.

    Raises:
        ImportError: It was not built for this process; the sentence says what mends it.
    """
    import torch

    problem = _mismatch(torch.__version__)
    if problem is not None:
        raise ImportError(problem)
    try:
        return importlib.import_module(f"hotop.{name}")
    except ImportError as error:
        raise ImportError(
            f"hotop.{name} cannot be loaded ({error}); rebuild it with: {REBUILD}"
        ) from error


CORE, PROBLEM = load_core()
if CORE is None:
    warnings.warn(
        f"{PROBLEM}. In this process hotop.custom_op is torch.library.custom_op.",
        RuntimeWarning,
        stacklevel=3,
    )
