"""``python -m hotop``: argument parsing and exit codes."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hotop import run

_COMMANDS = {
    "run": ("hotop.run", "run a program unchanged, with hotop installed into it"),
    "bench": ("hotop.bench.cli", "measure what an op's call costs, against PyTorch's own ways"),
    "tuner": ("hotop.tuner.cli", "show, merge and clear files of tuned choices"),
    "ltx2": (
        "hotop.ltx2.cli",
        "denoise with LTX-2's transformer, its two hot ops registered each way",
    ),
    "demo": ("hotop.demo.cli", "generate with a small transformer whose ops are made three ways"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after the program's name; None: those of this process.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["run"]:
        # Its words are the program's, not argparse's; and the other commands' modules are not
        # needed.
        return run.main(words[1:])
    parser = argparse.ArgumentParser(
        prog="python -m hotop", description=__import__("hotop").__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs = {}
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == "run":
            continue
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # numpy, rich and matplotlib are an extra, so that the library itself needs only torch.
            missing = error.name
            runs[name] = lambda _, missing=missing: _say_missing(missing)
            continue
        module.add_arguments(command)
        runs[name] = module.run
    arguments = parser.parse_args(words)
    return int(runs[arguments.command](arguments))


def _say_missing(module_name: str | None) -> int:
    print(
        f"hotop: this command needs {module_name}; install it with: pip install 'hotop[tools]'",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
