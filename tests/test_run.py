"""``python -m hotop run``: the program is Python's own, and what is refused."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hotop import __main__, run

RUN = (sys.executable, "-m", "hotop", "run")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOTOP", "HOTOP_ACCELERATE", "HOTOP_REPORT", "HOTOP_DISABLE", run.AUTOLOAD):
        monkeypatch.delenv(name, raising=False)


def start(*words: str, text: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *words], input=text, capture_output=True, text=True, check=False, cwd=cwd
    )


def plan(*words: str) -> run.Plan:
    made = run.make_plan(words, ["-X", "dev"])
    assert made is not None
    return made


def refused(*words: str) -> str:
    with pytest.raises(run.Refusal) as caught:
        run.make_plan(words, [])
    return str(caught.value)


# What is executed


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text("print(1)\n")
    return str(path)


def test_every_word_after_the_program_is_its_own(script: str) -> None:
    for program in ([script], ["-m", "timeit"], ["-mtimeit"], ["-c", "pass"], ["-"]):
        words = [*program, "--report", "--accelerate", "x", "-h", "--", "-m", "a"]
        assert plan(*words) == run.Plan(
            sys.executable, [sys.executable, "-X", "dev", *words], {"HOTOP": "1"}
        )


def test_a_pipe_is_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o700)
    assert plan(str(pipe)).words == [sys.executable, "-X", "dev", str(pipe)]
    assert start("/dev/stdin", text="print('read')").stdout == "read\n"


def test_options_before_the_program(script: str) -> None:
    everything = {"HOTOP": "1", "HOTOP_ACCELERATE": "aten,vllm", "HOTOP_REPORT": "1"}
    assert plan("--report", "--accelerate", "aten, vllm", script).settings == everything
    assert plan("--accelerate=aten,vllm", "--report", "--", script).settings == everything
    assert plan("--", script, "--").words[-2:] == [script, "--"]
    assert run.make_plan(["--report", "-h", "x"], []) is None
    assert run.make_plan(["--help"], []) is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no program to run is given"),
        (["--report"], "no program to run is given"),
        (["--accelerate"], "needs names of namespaces"),
        (["--accelerate", "a,,b", "x"], "needs names of namespaces"),
        (["--accelerate=", "x"], "needs names of namespaces"),
        (["--accelerate", "serve py", "x"], "not 'serve py'"),
        (["--acelerate", "x"], "unknown option --acelerate"),
        (["-m"], "argument expected for the -m option"),
        (["-x", "f.py"], "unknown option -x"),
        (["no/such.py"], "can't open file 'no/such.py': [Errno 2] No such file or directory"),
        (["no-such-program"], "no program on PATH has this name"),
        (["."], "can't find '__main__' module in '.'"),
    ],
)
def test_refusals(words: list[str], sentence: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(*words)
    assert sentence in said
    assert "\n" not in said


def test_refuses_where_nothing_would_be_installed(script: str, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(run.AUTOLOAD, "0")
        assert f"{run.AUTOLOAD}=0 keeps PyTorch from loading hotop" in refused(script)
    with monkeypatch.context() as patch:
        patch.setattr(run, "entry_points", lambda **_: [])
        assert "entry point for PyTorch is not installed" in refused(script)
    monkeypatch.setenv("HOTOP_DISABLE", "1")
    done = start("-c", "import torch")
    assert done.stderr == "hotop is switched off by HOTOP_DISABLE; the program runs without it\n"


def test_a_file_that_cannot_be_looked_at_is_said_so() -> None:
    name = "a" * 300 + ".py"
    done = start(name)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"hotop run: can't open file {name!r}: [Errno 36] File name too long, and no program on "
        "PATH has this name"
    ]


def executable(path: Path, *lines: str) -> Path:
    path.write_text("\n".join([*lines, ""]))
    path.chmod(0o755)
    return path


def test_programs_on_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    same = [sys.executable, "-X", "dev"]
    ours = executable(tmp_path / "ours", f"#!{sys.executable} -sE")
    long = executable(tmp_path / "long", "#!/bin/sh", f"'''exec' {sys.executable} \"$0\" \"$@\"")
    assert plan("ours", "a") == run.Plan(
        sys.executable, [*same, "-sE", str(ours), "a"], {"HOTOP": "1"}
    )
    assert plan("long", "a").words == [*same, str(long), "a"]
    (tmp_path / "python3").symlink_to(sys.executable)
    other = executable(tmp_path / "other", "#!/usr/bin/env python3")
    made = plan("other", "--report")
    assert (made.file, made.words) == (str(other), ["other", "--report"])
    assert f"other runs with another Python, {tmp_path / 'python3'}" in made.note
    shell = executable(tmp_path / "shell", "#!/bin/sh")
    assert plan("shell", "a") == run.Plan(str(shell), ["shell", "a"], {"HOTOP": "1"})
    # A file that is named by its path is Python's, as with `python FILE`, unless it cannot be.
    assert plan(str(other)).words == [*same, str(other)]
    assert plan(str(shell)).file == str(shell)


def test_a_program_beside_this_python_need_not_be_on_path(tmp_path: Path, monkeypatch) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    beside = executable(python.parent / "tool", f"#!{python}")
    assert plan("tool").words == [str(python), "-X", "dev", str(beside)]
    executable(tmp_path / "tool", "#!/another/bin/python3")
    assert plan("tool").words == [str(python), "-X", "dev", str(beside)]
    executable(tmp_path / "tool", "#!/bin/sh")
    assert plan("tool").file == str(tmp_path / "tool")


@pytest.mark.parametrize(
    ("command_line", "options"),
    [
        ("-m hotop run a -m hotop", []),
        ("-X dev -m hotop run a -m hotop", ["-X", "dev"]),
        ("-uX dev -Im hotop run a -m hotop", ["-uX", "dev", "-I"]),
        ("-u -mhotop run a -m hotop", ["-u"]),
        ("-ubmhotop run a -m hotop", ["-ub"]),
        (f"{Path(sys.executable).parent}/hotop run a -m hotop", []),
        ("/elsewhere/hotop run a -m hotop", None),
        ("-m other run a -m hotop", None),
        ("program.py run a -m hotop", None),
        ("run a -m hotop", None),
    ],
)
def test_options_of_the_interpreter(command_line: str, options: list[str] | None) -> None:
    words = [sys.executable, *command_line.split()]
    assert run._options_before_hotop(words, 4) == options


def test_leaves_early_only_as_the_command(monkeypatch) -> None:
    def leaves(argv: Sequence[str], line: str) -> bool:
        monkeypatch.setattr(sys, "argv", list(argv))
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, *line.split()])
        monkeypatch.setattr(run, "main", lambda words: 7 if words == ["x"] else 8)
        try:
            run.leave_early()
        except SystemExit as stop:
            return stop.code == 7
        return False

    assert leaves(["-m", "run", "x"], "-m hotop run x")
    assert leaves(["-m", "run", "x"], "-Xdev -mhotop run x")
    assert not leaves(["-m", "run", "x"], "-m other run x")
    assert not leaves(["-m", "bench", "run", "x"], "-m hotop bench run x")
    assert not leaves(["hotop", "run", "x"], "hotop run x")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["run", "--help"]) == 0
    assert capsys.readouterr().out.startswith(run.USAGE)
    assert __main__.main(["run"]) == 2
    assert capsys.readouterr().err.startswith("hotop run: no program")
    with pytest.raises(SystemExit):
        __main__.main(["--help"])
    assert "run a program unchanged" in capsys.readouterr().out


# The program itself

PROGRAM = """
import os, subprocess, sys
print(sys.argv, __name__, sys.path[0], sys.flags.dev_mode, input(), "hotop" in sys.modules)
print([os.environ.get(n) for n in ("HOTOP", "HOTOP_ACCELERATE", "HOTOP_REPORT")])
import torch
@torch.library.custom_op("hoprun::f", mutates_args=())
def f(x: torch.Tensor) -> torch.Tensor:
    return x + 1
[f(torch.ones(2)) for _ in range(5)]
if "child" not in sys.argv:
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__, "child"], input="from parent", text=True)
sys.exit(3)
"""


def test_a_program_and_its_child(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [
            *(sys.executable, "-X", "dev", *RUN[1:], "--report", "--accelerate=hoprun,hopnone"),
            *(str(path), "--report", "a b"),
        ],
        input="line\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    settings = "['1', 'hoprun,hopnone', '1']"
    assert done.stdout.splitlines() == [
        f"{[str(path), '--report', 'a b']} __main__ {tmp_path} True line False",
        settings,
        f"{[str(path), 'child']} __main__ {tmp_path} False from parent False",
        settings,
    ]
    lines = done.stderr.splitlines()
    heads = [line for line in lines if line.startswith("hotop: process ") and ".py" in line]
    assert [line.rsplit(".py", 1)[1] for line in heads] == [" child", " --report a b"]
    ops = [line.split() for line in lines if "hoprun::f" in line]
    assert [op[:5] for op in ops] == [["hoprun::f", "custom_op", "5", "0", "0"]] * 2
    # The child may have other work than the program; only the program says what it lacks.
    assert [line for line in lines if "'hopnone'" in line] == [
        line for line in lines if "has no operators of the namespace" in line
    ]
    assert sum("'hopnone'" in line for line in lines) == 1


def test_endings_are_pythons(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import sys\nif sys.argv[1:]: sys.exit(sys.argv[1])\nraise ValueError('mine')")
    assert start(str(path), "sentence").stderr == "sentence\n"
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    ours = start(str(path))
    assert (ours.returncode, ours.stderr, ours.stdout) == (1, plain.stderr, "")
    missing = start("nosuch.py", cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("hotop run: can't open file 'nosuch.py': [Errno 2] No such")
    assert missing.stderr.count("\n") == 1
    module = start("-m", "hopnosuch")
    assert (module.returncode, module.stderr) == (
        1,
        f"{sys.executable}: No module named hopnosuch\n",
    )
    assert start("-m", "timeit", "-n1", "-r1").stdout.startswith("1 loop")
    assert start("-", text="print(__name__, 1 / 8)").stdout == "__main__ 0.125\n"
    broken = executable(tmp_path / "broken", "#!/nosuch/shell")
    assert start(str(broken)).returncode == 2
    for word in ("", str(tmp_path)):
        plain = subprocess.run([sys.executable, word], capture_output=True, check=False)
        assert start(word).returncode == plain.returncode == 1


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream(closed: int, tmp_path: Path) -> None:
    """A service may start without one of its streams; Python then has None in its place."""
    path = tmp_path / "program.py"
    path.write_text("import sys\nprint('said', file=sys.stdout or sys.stderr)\n")
    seen = []
    for command in ([sys.executable], RUN, [*RUN, "--nonsense"]):
        close = {"preexec_fn": lambda: os.close(closed)}
        done = subprocess.run(
            [*command, str(path)], **close, capture_output=True, text=True, check=False
        )
        seen.append((done.returncode, done.stdout, done.stderr))
    assert seen[0] == seen[1] == (0, *(("said\n", "") if closed == 2 else ("", "said\n")))
    assert seen[2][:2] == (2, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGPIPE])
def test_signals(number: signal.Signals, tmp_path: Path) -> None:
    """The process that was started is the program: a signal to it is a signal to the program."""
    path = tmp_path / "program.py"
    path.write_text(
        "import signal, sys, time\n"
        "print([signal.getsignal(n) for n in (2, 13, 15)] + [signal.pthread_sigmask(0, [])])\n"
        "sys.stdout.flush()\ntime.sleep(60)\n"
    )
    seen = []
    for command in ([sys.executable], RUN):
        # A background job of a shell, as CI may be, ignores SIGINT and hands that on.
        heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([*command, str(path)], **heed, **pipes) as process:
            said = process.stdout.readline()
            if number == signal.SIGPIPE:  # which Python ignores
                process.kill()
            else:
                process.send_signal(number)
            last_words = process.communicate(timeout=30)[1].splitlines()[-1:]
            seen.append((said, last_words, process.returncode))
    assert seen[0] == seen[1]
    assert seen[0][2] == {signal.SIGPIPE: -9}.get(number, -number)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two CPUs",
)
def test_the_process_is_as_it_was(tmp_path: Path) -> None:
    """With OMP_PROC_BIND, importing torch binds the process to one CPU; an exec would keep that."""
    path = tmp_path / "program.py"
    path.write_text(
        "import os\nprint(sorted(os.sched_getaffinity(0)), os.environ.get('OMP_NUM_THREADS'),"
        " sorted(os.listdir('/proc/self/fd')))\n"
    )
    environment = {**os.environ, "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    plain, ours = (
        subprocess.run(
            [*command, str(path)], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for command in ([sys.executable], RUN)
    )
    assert plain == ours
