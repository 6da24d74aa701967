"""``python -m hotop run``: start a program unchanged, with hotop installed into it.

The program is not run in this process. The environment is set and Python is executed again in
its place, so ``sys.argv``, ``__main__``, exit codes, signals, stdin and every child process are
Python's own. Only the standard library is imported here: importing torch first would cost seconds
and could leave its marks on the process that the program gets (with OMP_PROC_BIND set, OpenMP binds
the process to one CPU when torch is loaded, and an exec keeps that).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

USAGE = "usage: python -m hotop run [--accelerate NS,...] [--report] (SCRIPT | -m MODULE) [ARG ...]"
HELP = f"""{USAGE}

Run a program unchanged, with PyTorch's operators accelerated by hotop in it and in the Python
processes that it starts.

  SCRIPT               a Python file, a directory or zip file with a __main__.py, or a program on
                       PATH such as torchrun
  -m MODULE            run a module, as python -m does; -c CODE runs code
  ARG ...              everything after SCRIPT or MODULE belongs to the program

options:
  --accelerate NS,...  accelerate also every operator of these namespaces, for instance aten,vllm;
                       operators registered from Python are accelerated without this
  --report             when a process ends, print to stderr which operators were called, by which
                       road, and an estimate of the host time saved
  -h, --help           show this text

The same by the environment: HOTOP=1, HOTOP_ACCELERATE=NS,... and HOTOP_REPORT=1.
HOTOP_DISABLE=1 switches hotop off."""

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_PYTHON = re.compile(r"(python|pypy)[\d.]*\w*")
_NAMESPACE = re.compile(r"\w+(\.\w+)*")


class Refusal(Exception):
    """Why the program is not started, in one sentence, and Python's exit code for that."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Plan:
    """What to execute.

    Attributes:
        file: The file to execute.
        words: Its words, the first being its own name.
        settings: The environment variables to set.
        note: What the user should know, or an empty string.
    """

    file: str
    words: list[str]
    settings: dict[str, str]
    note: str = ""


def main(words: Sequence[str], options: Sequence[str] | None = None) -> int:
    """Start the program that the words name; return only if it was not started.

    Args:
        words: The words after ``run``.
        options: Options of the interpreter that the program gets too, for instance ``-X dev``;
            None: those of this process.

    Returns:
        The exit code: 0 after ``--help``; 1 for a directory without ``__main__.py``, as Python; 2
        if nothing was started for another reason.
    """
    try:
        plan = make_plan(words, interpreter_options() if options is None else options)
        if plan is None:
            print(HELP)
            return 0
        if plan.note:
            _say(plan.note)
        _execute(plan)
    except Refusal as refusal:
        _say(str(refusal))
        return refusal.exit_code


def _say(text: str) -> None:
    if sys.stderr is not None:  # it may be closed
        print(f"hotop run: {text}", file=sys.stderr)


def leave_early() -> None:
    """Start the program now if this process is ``python -m hotop run``; else return.

    hotop's package calls this before it imports torch.
    """
    if sys.argv[1:2] == ["run"] and _is_hotop_command():
        sys.exit(main(sys.argv[2:]))


def make_plan(words: Sequence[str], options: Sequence[str]) -> Plan | None:
    """Return what the words after ``run`` ask for; None: the help.

    Raises:
        Refusal: Nothing can be started, or hotop would not be installed into it.
    """
    rest = list(words)
    settings = {"HOTOP": "1"}
    while rest:
        word = rest[0]
        if word in ("-h", "--help"):
            return None
        if word == "--report":
            settings["HOTOP_REPORT"] = "1"
        elif word == "--accelerate" or word.startswith("--accelerate="):
            if word == "--accelerate":
                rest.pop(0)
            value = rest[0].removeprefix("--accelerate=") if rest else ""
            settings["HOTOP_ACCELERATE"] = _namespaces(value)
        elif word == "--":
            rest.pop(0)
            break
        else:
            break
        rest.pop(0)
    if not rest:
        raise Refusal(f"no program to run is given; {USAGE}")
    _check_autoload()
    file, arguments, remark = _target(rest, list(options))
    return Plan(file, arguments, settings, remark)


def _namespaces(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if not _NAMESPACE.fullmatch(name):
            raise Refusal(
                f"--accelerate needs names of namespaces with commas between them, such as "
                f"aten,vllm, and not {value!r}"
            )
    return ",".join(names)


def _check_autoload() -> None:
    """Refuse where PyTorch would not load hotop's entry point."""
    if os.environ.get(AUTOLOAD, "1") != "1":
        raise Refusal(
            f"{AUTOLOAD}={os.environ[AUTOLOAD]} keeps PyTorch from loading hotop into the program; "
            "unset it, or call hotop.install() in the program"
        )
    if not entry_points(group="torch.backends", name="hotop"):
        raise Refusal(
            "hotop's entry point for PyTorch is not installed, so PyTorch would not load hotop "
            "into the program; install hotop again with pip, or call hotop.install() in the program"
        )


def _target(rest: list[str], options: list[str]) -> tuple[str, list[str], str]:
    """Return the file to execute, its words, and a remark."""
    word = rest[0]
    if not sys.executable:
        raise Refusal("this Python does not know its own file (sys.executable is empty)")
    python = [sys.executable, *options]
    if word == "-" or (word[:2] in ("-m", "-c") and (len(word) > 2 or len(rest) > 1)):
        return sys.executable, python + rest, ""
    if word in ("-m", "-c"):
        raise Refusal(f"argument expected for the {word} option; {USAGE}")
    if word.startswith("-"):
        raise Refusal(f"unknown option {word}; {USAGE}")
    path = Path(word)
    mode, has_main, error = 0, False, "[Errno 2] No such file or directory"
    try:
        mode = path.stat().st_mode
        has_main = stat.S_ISDIR(mode) and (path / "__main__.py").is_file()
    except OSError as problem:
        error = f"[Errno {problem.errno}] {problem.strerror}"
    # A pipe is a file too: /dev/stdin, a shell's <(...).
    is_file = mode != 0 and not stat.S_ISDIR(mode)
    if is_file or has_main:
        if stat.S_ISREG(mode) and os.access(path, os.X_OK) and not _may_be_python(path):
            return str(path.absolute()), rest, _remark(word, word)
        return sys.executable, python + rest, ""
    found, own = _program(word)
    if found is None:
        if stat.S_ISDIR(mode):
            raise Refusal(f"can't find '__main__' module in {word!r}", 1)
        by_path = "" if os.sep in word else ", and no program on PATH has this name"
        raise Refusal(f"can't open file {word!r}: {error}{by_path}")
    if own and _is_this_python(own[0]):
        return sys.executable, [*python, *own[1:], found, *rest[1:]], ""
    return found, rest, _remark(word, own[0] if own else found)


def _remark(word: str, python: str) -> str:
    if not _PYTHON.fullmatch(Path(python).name) or _is_this_python(python):
        return ""
    which = "is another Python" if word == python else f"runs with another Python, {python}"
    return f"{word} {which}; nothing is accelerated unless that one has hotop too"


def _program(name: str) -> tuple[str | None, list[str]]:
    """Return the program on PATH, and the Python and options that its first line names.

    One that belongs to this Python stands beside it, which need not be on PATH.
    """
    if os.sep in name:
        return None, []
    found = shutil.which(name)
    own = _interpreter_of(Path(found)) if found else []
    if found is None or (own and not _is_this_python(own[0])):
        beside = shutil.which(name, path=str(Path(sys.executable).parent))
        if beside is not None:
            return beside, _interpreter_of(Path(beside))
    return found, own


def _first_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            return file.read(4096).splitlines()[:2]
    except OSError:
        return []


def _may_be_python(path: Path) -> bool:
    """Return whether an executable file could be meant for Python: no binary, no other script."""
    first = (_first_lines(path) or [b""])[0]
    if first.startswith(b"\x7fELF"):
        return False
    return not first.startswith(b"#!") or bool(_interpreter_of(path))


def _interpreter_of(path: Path) -> list[str]:
    """Return the Python that a script's first lines name, and its options; [] if they do not."""
    lines = _first_lines(path)
    if not lines or not lines[0].startswith(b"#!"):
        return []
    first = lines[0][2:].decode(errors="replace")
    if first.strip() == "/bin/sh" and len(lines) > 1 and lines[1].startswith(b"'''exec'"):
        # How pip and uv write an interpreter whose path is too long or has spaces.
        first = lines[1].decode(errors="replace").removeprefix("'''exec'")
    try:
        words = [word for word in shlex.split(first) if word not in ("$0", "$@")]
    except ValueError:
        return []
    if words and Path(words[0]).name == "env":
        while words and (words[0].startswith("-") or "=" in words[0] or words[0].endswith("env")):
            words.pop(0)
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return []
    python = words[0] if os.sep in words[0] else shutil.which(words[0]) or words[0]
    return [python, *words[1:]]


def _is_this_python(executable: str) -> bool:
    """Return whether it is this Python; two environments of one Python are not the same."""
    ours, theirs = Path(sys.executable), Path(executable)
    return (
        theirs.exists()
        and ours.samefile(theirs)
        and ours.absolute().parent.samefile(theirs.absolute().parent)
    )


def interpreter_options() -> list[str]:
    """Return the options that this process's Python was started with, before ``-m hotop``."""
    own = _options_before_hotop(sys.orig_argv, len(sys.argv) - 1)
    # Called from a program: what the standard library can tell about the interpreter.
    return subprocess._args_from_interpreter_flags() if own is None else own  # type: ignore[attr-defined]


def _options_before_hotop(orig_argv: Sequence[str], words: int) -> list[str] | None:
    """Return the options in a command line of ``python -m hotop`` or ``hotop``, or None.

    Args:
        orig_argv: ``sys.orig_argv``.
        words: How many words at its end are hotop's.
    """
    options = list(orig_argv[1 : len(orig_argv) - words])
    if not options:
        return None
    last = options.pop()
    if last == "hotop" and options and re.fullmatch(r"-[A-Za-z]*m", options[-1]):
        last = options.pop() + last
    if re.fullmatch(r"-[A-Za-z]*mhotop", last):  # -mhotop, -Im hotop
        flags = last.removesuffix("mhotop")
        return options + [flags] * (flags != "-")
    return options if _is_console_script(last) else None


def _is_hotop_command() -> bool:
    # While `python -m hotop` imports the package, sys.argv[0] is "-m".
    if sys.argv[0] != "-m" and not _is_console_script(sys.argv[0]):
        return False
    return _options_before_hotop(sys.orig_argv, len(sys.argv) - 1) is not None


def _is_console_script(file: str) -> bool:
    path = Path(file)
    return path.name == "hotop" and path.parent.resolve() == Path(sys.executable).parent.resolve()


def _execute(plan: Plan) -> NoReturn:
    # The process that starts here, which its number tells from its children, reports even nothing.
    environment = {**os.environ, **plan.settings, "HOTOP_RUN_PID": str(os.getpid())}
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # CPython ignores these at its start, and an exec would keep that; a program that is not Python
    # expects the default, as from a shell.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execve(plan.file, plan.words, environment)
    except OSError as error:
        raise Refusal(f"can't start {plan.file!r}: {error}") from error
