"""Pick the fastest of an op's tactics by shape; a look-up costs a few tens of nanoseconds."""

from hotop.tuner._buckets import Bucket, exact, follows, listed, power_of_two
from hotop.tuner._decorator import tunable
from hotop.tuner._session import agree, tuning
from hotop.tuner._signature import Tactic
from hotop.tuner._store import BrokenTable, default_path
from hotop.tuner._tunable import Statistics, Tunable, clear, load, stats

__all__ = [
    "BrokenTable",
    "Bucket",
    "Statistics",
    "Tactic",
    "Tunable",
    "agree",
    "clear",
    "default_path",
    "exact",
    "follows",
    "listed",
    "load",
    "power_of_two",
    "stats",
    "tunable",
    "tuning",
]
