"""A short run of the differential fuzzer, and that a broken hotop does not pass it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import seeds
from twin import needs_hotop

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.fuzz.campaign import case_seed, run_campaign  # noqa: E402
from tools.fuzz.compare import SPOILS  # noqa: E402

STORED = (20261130, 663799954)


def words(failures: list) -> str:
    return "\n".join(
        f"python -m tools.fuzz --replay {f.replay}\n  {f.title}\n  " + "\n  ".join(f.lines[:6])
        for f in failures[:5]
    )


@needs_hotop
@pytest.mark.parametrize("stored", STORED)
def test_hotop_is_pytorch(stored: int) -> None:
    master = seeds.seed(stored)
    totals = run_campaign(800, master)
    assert totals.calls >= 800
    assert totals.counts["direct"] > 100, totals.counts
    assert not totals.failures, f"master seed {master}\n{words(totals.failures)}"


@needs_hotop
def test_an_op_that_is_accelerated_and_given_back_is_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOTOP_TWIN_FACTORY", "twin_existing:custom_op")  # the workers read it
    master = seeds.seed(41)
    totals = run_campaign(800, master)
    assert totals.counts["switches"] > 20, totals.counts
    assert not totals.failures, f"master seed {master}\n{words(totals.failures)}"


@needs_hotop
@pytest.mark.parametrize("spoil", sorted(SPOILS))
def test_a_broken_hotop_is_found(spoil: str, spoiled_runs: dict) -> None:
    assert spoiled_runs[spoil] > 0, f"{spoil}: not found"


@pytest.fixture(scope="module")
def spoiled_runs() -> dict[str, int]:
    """Run a few cases with each break, in one process of their own."""
    program = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tools.fuzz import __main__ as command\n"
        "command._quiet()\n"
        "from tools.fuzz.case import run_case\n"
        "from tools.fuzz.compare import SPOILS\n"
        "found = {}\n"
        "for spoil in SPOILS:\n"
        "    found[spoil] = 0\n"
        "    for seed in range(1000, 1012):\n"
        "        found[spoil] += len(run_case(seed, steps=40, spoil=spoil).findings)\n"
        "        if found[spoil]:\n"
        "            break\n"
        "print('FOUND ' + json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def test_seeds_do_not_repeat() -> None:
    seeds = {case_seed(master, index) for master in range(50) for index in range(200)}
    assert len(seeds) == 50 * 200
    assert case_seed(1, 2) == case_seed(1, 2)


@needs_hotop
def test_a_crash_belongs_to_its_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A worker whose second case kills the process; the third is still run.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, tools.fuzz.case as case\n"
        "run = case.run_case\n"
        f"bad = {case_seed(5, 1)}\n"
        "def killed(seed, **options):\n"
        "    if seed == bad:\n"
        "        options['say']('7: dies here')\n"
        "        os.abort()\n"
        "    return run(seed, steps=3, **options)\n"
        "case.run_case = killed\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    totals = run_campaign(6, 5, batch=3)
    crashes = [f for f in totals.failures if "crash" in f.title]
    assert [f.replay for f in crashes] == [f"{case_seed(5, 1)}:7"]
    assert "dies here" in crashes[0].title
    assert totals.cases > 1
