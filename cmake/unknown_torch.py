"""Compile as told, for a PyTorch newer than those that hotop knows; say in one sentence what fails.

usage: unknown_torch.py TORCH_VERSION KNOWN_VERSIONS COMPILER ARGUMENTS...
"""

import subprocess
import sys
from pathlib import Path

version, known, *command = sys.argv[1:]
done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
if done.returncode == 0:
    sys.stderr.write(done.stderr)
else:
    log = Path("unknown_torch.txt").absolute()
    log.write_text(done.stderr)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    what = errors[0].partition("error:")[2].strip() if errors else f"exit code {done.returncode}"
    sys.stderr.write(
        f"hotop: PyTorch {version} is newer than this hotop knows ({known}) and does not fit it: "
        f"{what}; take a newer hotop or one of those (all errors: {log}).\n"
    )
sys.exit(done.returncode)
