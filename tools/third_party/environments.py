"""Makes the environments that the packages run in: theirs first, the running interpreter's last."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

# What is installed is written here, so that a second run installs nothing.
INSTALLED = "installed.txt"


def interpreter(folder: Path) -> Path:
    """The Python of an environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def make(folder: Path, requirements: list[str]) -> Path:
    """Makes the environment `folder` unless it is there with the same requirements.

    Returns:
        Its Python.

    Raises:
        subprocess.CalledProcessError: When pip could not install a requirement.
    """
    wanted = "\n".join([sys.version, *requirements])
    installed = folder / INSTALLED
    if installed.exists() and installed.read_text() == wanted:
        return interpreter(folder)
    venv.create(folder, clear=True, with_pip=False)
    python = interpreter(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    # Pip's complaints about other packages' wishes are no news: nothing is resolved.
    subprocess.run([*pip, *options, *requirements], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # addsitedir and not a path alone, for the .pth files of editable packages there (hotop).
    # It appends, so what is installed here comes first.
    shared = sysconfig.get_paths()["purelib"]
    (Path(site) / "zz_running_interpreter.pth").write_text(
        f"import site; site.addsitedir({shared!r})\n"
    )
    installed.write_text(wanted)
    return python
