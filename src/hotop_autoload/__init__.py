"""What ``import torch`` calls when it loads plugins; does nothing unless HOTOP=1 is set.

PyTorch loads every entry point of the group ``torch.backends`` at the end of its import. This
package stands apart from hotop so that a program without HOTOP=1 pays for this file alone.
"""

import os

_done = False


def start() -> None:
    """Install hotop into this process if the environment asks for it.

    ``HOTOP=1`` asks; ``HOTOP_ACCELERATE`` names further namespaces, with commas between them;
    ``HOTOP_REPORT=1`` prints the report when the process ends. Whatever goes wrong becomes one
    line on stderr: an import of torch, and the program around it, never fail because of hotop.
    """
    global _done
    if _done or os.environ.get("HOTOP", "0") in ("", "0"):
        return
    _done = True  # before hotop is imported, which calls start() too
    try:
        _done = _install()
    except Exception as error:
        _undo()
        _say(
            f"could not be installed ({type(error).__name__}: {_one_line(error)}); "
            "the program runs without it; unset HOTOP, or install hotop again"
        )


def _install() -> bool:
    """Install, and return False if hotop itself is the one that is importing torch just now."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        import hotop

        if not hasattr(hotop, "install"):
            spec = hotop.__spec__
            if spec is not None and getattr(spec, "_initializing", False):
                return False  # hotop calls start() again at its end
            raise ImportError(f"{hotop.__file__} is another version of hotop")
        from hotop import _load

        problem = _load.PROBLEM if _load.CORE is None else ""
        if problem:
            _say(f"{problem}; the program runs without it")
        else:
            hotop.install()
    for warning in caught:
        if problem and str(warning.message).startswith(problem):
            continue  # said above, in one line
        warnings.showwarning(
            warning.message, warning.category, warning.filename, warning.lineno, line=warning.line
        )
    if problem:
        return True
    namespaces = [name.strip() for name in os.environ.get("HOTOP_ACCELERATE", "").split(",")]
    namespaces = list(dict.fromkeys(filter(None, namespaces)))
    report = os.environ.get("HOTOP_REPORT", "0") not in ("", "0")
    if namespaces or report:
        from hotop import _at_exit

        try:
            _at_exit.begin(namespaces, print_report=report)
        except Exception as error:
            _say(
                f"HOTOP_ACCELERATE={','.join(namespaces)} is not accelerated "
                f"({type(error).__name__}: {_one_line(error)}); the rest of hotop is installed"
            )
    return True


def _undo() -> None:
    """Take back what an install that failed half-way did."""
    import contextlib
    import sys

    with contextlib.suppress(Exception):
        sys.modules["hotop"].uninstall()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _say(text: str) -> None:
    import contextlib
    import sys

    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text if text.startswith("hotop") else f"hotop: {text}", file=sys.stderr)
