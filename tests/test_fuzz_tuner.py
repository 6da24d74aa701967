"""A short run of the tuner's fuzzer, and that a tuner with a broken check does not pass it."""

import sys
from pathlib import Path

import pytest

import seeds
from twin import needs_hotop

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.fuzz_tuner.campaign import run_campaign  # noqa: E402


def words(failures: list) -> str:
    return "\n".join(
        f"python -m tools.fuzz_tuner --replay {f.replay}\n  {f.title}\n  " + "\n  ".join(f.lines)
        for f in failures[:5]
    )


@needs_hotop
def test_tuned_calls_are_the_ops() -> None:
    master = seeds.seed(20261201)
    totals = run_campaign(250, master)
    assert totals.keys >= 250
    assert totals.calls > 5 * totals.keys
    refused = sum(n for name, n in totals.counts.items() if name.startswith("refused: "))
    assert refused > 100, totals.counts
    assert totals.counts["winner: right"] > 100, totals.counts
    assert not totals.failures, f"master seed {master}\n{words(totals.failures)}"


@needs_hotop
@pytest.mark.parametrize(
    "broken",
    ["no copies", "values not compared", "strides not compared", "settings not compared"],
)
def test_a_broken_check_is_found(broken: str) -> None:
    totals = run_campaign(400, 7, broken=broken, most_failures=1)
    assert totals.failures, f"{broken}: not found"
