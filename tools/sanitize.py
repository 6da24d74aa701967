"""``make sanitize``: build the extensions with sanitizers and run tests on them; valgrind too.

Address and UndefinedBehavior in one build, Thread in another. CPython and PyTorch are not
instrumented: AddressSanitizer sees every allocation (PYTHONMALLOC=malloc), but only accesses made
by hotop's code and by the C library's functions; ThreadSanitizer sees races between hotop's own
accesses, and the locks of everybody. Valgrind's memcheck sees every access of everybody, and values
that were never set; what counts is what hotop's code did, or an access to freed or foreign memory
somewhere below it. Leaks are not looked for here: CPython keeps too much; that
is what tests/test_leaks*.py are for.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {"address": "address,undefined", "thread": "thread", "memcheck": ""}
RUNTIMES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
TESTS = {
    "address": [
        "tests/test_faults.py",
        "tests/test_faults_removal.py",
        "tests/test_custom_op_db.py",
        "tests/test_hostile_kernels.py",
        "tests/test_recorded.py",
        "tests/test_recorded_attack.py",
        "tests/test_twin_autograd.py",
        "tests/test_existing.py",
        "tests/test_existing_kernels.py",
        "tests/test_rules.py",
        "tests/test_existing_attack.py",
        "tests/test_first_call.py",
        "tests/test_install.py",
        "tests/test_odd_classes.py",
        "tests/test_boxed_errors.py",
        "tests/test_twin_calls.py",
        "tests/test_twin_returns.py",
        "tests/test_twin_mutation.py",
        "tests/test_twin_contexts.py",
        "tests/test_twin_overrides.py",
        "tests/test_twin_registration.py",
        "tests/test_leaks.py",
        "tests/test_threads.py",
        "tests/test_tuner.py",
        "tests/test_tuner_keys.py",
        "tests/test_tuner_layouts.py",
        "tests/test_tuner_safety.py",
        "tests/test_nvfp4_kernels.py",
        "tests/test_nvfp4_kernels_errors.py",
        "tests/test_nvfp4_kernels_gemm.py",
        "tests/test_nvfp4_ops.py",
    ],
    "thread": ["tests/test_threads.py", "tests/test_tuner_threads.py"],
    "memcheck": [  # thirty times slower than without
        "tests/test_hostile_kernels.py",
        "tests/test_odd_classes.py",
        "tests/test_existing_attack.py",
        "tests/test_recorded_attack.py",
        "tests/test_recorded.py",
        "tests/test_tuner_keys.py",
    ],
}
# The first asks for the resident memory, which the sanitizer's allocator keeps; the second sends a
# signal, which ThreadSanitizer holds back; the third's threads spin, and valgrind runs one only.
DESELECT = {
    "address": "tests/test_leaks.py::test_resident_memory",
    "thread": "tests/test_tuner_threads.py::test_second_interrupt_while_another_thread_measures",
    "memcheck": "tests/test_existing_attack.py"
    "::test_calls_while_another_thread_changes_what_is_accelerated",
}

FINDINGS = ("ERROR: AddressSanitizer", "runtime error:", "WARNING: ThreadSanitizer")

VALGRIND = (
    *("valgrind", "--tool=memcheck", "--error-limit=no", "--num-callers=40", "-q"),
    "--fair-sched=yes",  # a thread that spins would keep the others from running
)
OURS = re.compile(r"hotop::|/_(core|nvfp4)\.cpython")  # a frame, with or without its name
# The loader and the C library compare whole words, past the end of a string.
QUIRKS = re.compile(r"\(dl-\w+\.c|memcmp-avx2|\(strcmp-")
NEAR = 4  # frames from the innermost: a value that was not set is looked at by a helper

# libgomp's barriers are futexes that nobody sees. Nothing of CPython or PyTorch stands here: their
# locks, the GIL among them, are what orders hotop's accesses.
THREAD_SUPPRESSIONS = """\
called_from_lib:libgomp
"""


def runtime(name: str) -> str:
    """Return the path of a sanitizer's library, which must be the compiler's own."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"sanitize: {compiler} has no {name}; install its sanitizer libraries")
    return str(Path(found).resolve())


def build(kind: str, folder: Path) -> None:
    """Configure and compile in a build folder of this kind's own."""
    cmake = [shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")]
    if cmake[0] is None:
        sys.exit("sanitize: cmake is missing; run make build first")
    options = [
        f"-DCMAKE_BUILD_TYPE={'Release' if FLAGS[kind] else 'RelWithDebInfo'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DHOTOP_SANITIZE={FLAGS[kind]}",
        "-DHOTOP_CUDA=OFF",
    ]
    subprocess.run([cmake[0], "-S", ROOT, "-B", folder, "-G", "Ninja", *options], check=True)
    targets = ["_core"] if kind == "thread" else ["_core", "_nvfp4"]
    subprocess.run([cmake[0], "--build", folder, "--target", *targets], check=True)


def package(folder: Path) -> Path:
    """Make a ``hotop`` of the sources and the new binaries; PYTHONPATH puts it first."""
    place = folder / "package" / "hotop"
    shutil.rmtree(place.parent, ignore_errors=True)
    place.mkdir(parents=True)
    for source in (ROOT / "src" / "hotop").iterdir():
        if source.suffix != ".so" and source.name not in ("_stamp.py", "__pycache__"):
            (place / source.name).symlink_to(source)
    for made in [*folder.glob("_*.so"), folder / "_stamp.py"]:
        (place / made.name).symlink_to(made)
    # An editable install finds modules by a hook that comes before every path.
    (place.parent / "sitecustomize.py").write_text(
        "import sys\n"
        "hooks = [f for f in sys.meta_path if type(f).__name__ != 'ScikitBuildRedirectingFinder']\n"
        "sys.meta_path[:] = hooks\n"
    )
    return place.parent


def environment(kind: str, folder: Path) -> dict[str, str]:
    """Return the environment in which Python loads the sanitizer and the new binaries."""
    usual = {
        **os.environ,
        "PYTHONPATH": str(package(folder)),
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "2",
    }
    if kind == "memcheck":
        return usual
    suppressions = folder / "suppressions.txt"
    suppressions.write_text(THREAD_SUPPRESSIONS)
    log = f"log_path={folder}/report:print_stacktrace=1"
    return {
        **usual,
        "LD_PRELOAD": " ".join(map(runtime, RUNTIMES[kind])),
        "ASAN_OPTIONS": f"{log}:detect_leaks=0:detect_stack_use_after_return=0:"
        "allocator_may_return_null=1:handle_segv=0:intercept_cxx_exceptions=0",
        "UBSAN_OPTIONS": log,
        "TSAN_OPTIONS": f"{log}:halt_on_error=0:exitcode=0:report_signal_unsafe=0:"
        f"ignore_noninstrumented_modules=0:suppressions={suppressions}",
    }


def is_finding(error: str) -> bool:
    """Return whether an error of memcheck is hotop's."""
    frames = re.findall(r"^==\d+== +(?:at|by) (0x.*)$", error, re.MULTILINE)
    ours = next((i for i, frame in enumerate(frames) if OURS.search(frame)), len(frames))
    # CPython's and PyTorch's values that were not set are theirs, whoever called them.
    if "ninitialised" in error:
        return ours < NEAR
    return ours < len(frames) and not any(QUIRKS.search(frame) for frame in frames[:ours])


def findings_in(kind: str, text: str) -> list[str]:
    """Return the findings that a report holds, in its words."""
    if kind == "memcheck":
        return [error for error in re.split(r"^==\d+== \n", text, flags=re.M) if is_finding(error)]
    # A report of a failed allocation alone is a test's own doing.
    return [text] if any(word in text for word in FINDINGS) else []


def run(kind: str, tests: list[str]) -> int:
    """Return how many reports and failures there were."""
    folder = ROOT / "build" / "sanitize" / kind
    build(kind, folder)
    env = environment(kind, folder)
    for old in folder.glob("report*"):
        old.unlink()
    # A run that loads the ordinary binary would find nothing, and say so.
    where = "import hotop._core as core, sys; sys.stdout.write(core.__file__)"
    loaded = subprocess.run(
        [sys.executable, "-c", where], env=env, capture_output=True, text=True, cwd=folder
    )
    if str(folder) not in loaded.stdout:
        sys.exit(f"sanitize: the sanitized core does not load: {loaded.stdout}{loaded.stderr}")
    # ThreadSanitizer of GCC 12 cannot place its shadow under a wide address randomization.
    prefix = ["setarch", "-R"] if kind == "thread" else []
    if kind == "memcheck":
        if shutil.which("valgrind") is None:
            sys.exit("sanitize: valgrind is missing; install it, or name the kinds to run")
        prefix = [*VALGRIND, f"--log-file={folder}/report.%p"]
    deselect = ["--deselect", DESELECT[kind]]
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    code = subprocess.run([*command, *deselect, *tests], env=env, cwd=ROOT).returncode
    findings = 0
    for report in sorted(folder.glob("report*")):
        for text in findings_in(kind, report.read_text(errors="replace")):
            findings += 1
            print(f"\n--- {report.name}\n{text[:6000]}")
    print(f"sanitize: {kind}: pytest exit code {code}, findings: {findings}")
    return findings + (code != 0)


def main() -> None:
    """Parse the command line; exit with 1 when there was a finding."""
    parser = argparse.ArgumentParser(description="run tests with sanitizers and valgrind")
    parser.add_argument(
        "kinds", nargs="*", default=list(FLAGS), help=f"of {', '.join(FLAGS)}; all by default"
    )
    parser.add_argument("--tests", nargs="+", help="test files in place of the usual ones")
    arguments = parser.parse_args()
    if not set(arguments.kinds) <= set(FLAGS):
        parser.error(f"kinds are {', '.join(FLAGS)}; got {' '.join(arguments.kinds)}")
    found = sum(run(kind, arguments.tests or TESTS[kind]) for kind in arguments.kinds)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
