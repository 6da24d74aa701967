"""Say in one sentence what this machine lacks to build hotop. Runs on any Python 3."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile


def problem():
    """Return what is missing, or None."""
    if sys.version_info < (3, 11):
        return (
            "Python 3.11 or newer is needed, and %s is %d.%d. Name another with: "
            "make PYTHON=/path/to/python3.11" % (sys.executable, *sys.version_info[:2])
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return "Python's venv module is missing (on Debian: apt-get install python3-venv)."
    include = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(include, "Python.h")):
        return (
            "Python's headers are missing: there is no %s/Python.h "
            "(on Debian: apt-get install python3-dev)." % include
        )
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        return "there is no C++ compiler %r (on Debian: apt-get install g++)." % compiler
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "probe.cpp")
        with open(source, "w") as file:
            file.write("#include <concepts>\ntemplate <std::integral T> T f(T x) { return x; }\n")
        command = [*compiler.split(), "-std=c++20", "-fsyntax-only", source]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            return "%r does not compile C++20: %s" % (compiler, result.stderr.strip()[-400:])
    return None


if __name__ == "__main__":
    sentence = problem()
    if sentence:
        sys.exit("hotop: " + sentence)
