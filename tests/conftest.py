"""Every test, and every process that it starts, keeps its tuned choices out of the user's cache."""

import os
import tempfile

_directory = tempfile.TemporaryDirectory(prefix="hotop-tests-")
os.environ["HOTOP_TUNER_DIR"] = _directory.name
