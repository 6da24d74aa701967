"""``make sanitize``: what counts as a finding in the reports of the sanitizers and of valgrind."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.sanitize import findings_in

INVALID = "==7== Invalid read of size 8"
UNSET = "==7== Use of uninitialised value of size 8"
OURS = "0x52: hotop::(anonymous namespace)::push_value (boxed.cpp:142)"
STRIPPED = "0x52: ??? (in /a/hotop/_core.cpython-311-x86_64-linux-gnu.so)"
CPYTHON = "0x49: _PyEval_EvalFrame (pycore_ceval.h:73)"
LOADER = "0x40: is_dst (dl-load.c:216)"


def report(*errors: list[str]) -> str:
    """Write errors as valgrind does: their first line, then their frames."""
    blocks = []
    for kind, *frames in errors:
        lines = [kind, *(f"==7==    {'by' if i else 'at'} {f}" for i, f in enumerate(frames))]
        blocks.append("\n".join(lines) + "\n")
    return "==7== \n".join(blocks)


def test_memcheck() -> None:
    found = [
        [INVALID, OURS],
        [INVALID, CPYTHON, CPYTHON, CPYTHON, CPYTHON, CPYTHON, STRIPPED, CPYTHON],
        [UNSET, CPYTHON, OURS, CPYTHON],
    ]
    other = [
        [INVALID, CPYTHON],
        [INVALID, LOADER, CPYTHON, OURS],  # an import in a call: the loader reads whole words
        [UNSET, CPYTHON, CPYTHON, CPYTHON, CPYTHON, OURS],
    ]
    assert len(findings_in("memcheck", report(*found, *other))) == len(found)
    assert findings_in("memcheck", report(*other)) == []
    assert "push_value" in findings_in("memcheck", report(*other, found[0]))[0]


def test_sanitizers() -> None:
    failed_allocation = "==7==WARNING: AddressSanitizer failed to allocate 0x4000 bytes"
    assert findings_in("address", failed_allocation) == []
    for text in ("==7==ERROR: AddressSanitizer: heap-use-after-free", "a.cpp:1: runtime error: x"):
        assert findings_in("address", text) == [text]
    race = "WARNING: ThreadSanitizer: data race"
    assert findings_in("thread", race) == [race]
