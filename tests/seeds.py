"""The seeds of the random tests: stored ones, or with `HOTOP_FRESH_SEEDS=1` new ones in every run.

A run of the suite is the same on every machine; what is new is looked for by `make fuzz`,
`python -m tools.boxed` and with the switch.
"""

import os
import random

FRESH = os.environ.get("HOTOP_FRESH_SEEDS", "0") not in ("", "0")


def seed(stored: int) -> int:
    """Return the seed of a test, and print it for the report of a failure."""
    chosen = random.SystemRandom().randrange(10**9) if FRESH else stored
    print(f"seed {chosen}")
    return chosen
