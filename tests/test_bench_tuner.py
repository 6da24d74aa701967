"""``python -m hotop bench --tuner``: each contender does what its name says; the command runs."""

import argparse
import json

import torch

from hotop.bench import cli, tuner_bench
from hotop.bench.targets import tuner_targets
from hotop.bench.timing import Timing


def test_command(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    path = tmp_path / "tuner.json"
    assert cli.run(parser.parse_args(["--tuner", "--quick", "--json", str(path)])) == 0
    assert "tuner's look-up" in capsys.readouterr().out
    cases = json.loads(path.read_text())["tuner"]
    assert [len(case["timings"]) for case in cases] == [len(tuner_bench.SIZES) + 2] * 2


def test_hits_hit_and_misses_miss():
    for size, expected in ((1, (1, 0)), (50, (1, 0)), (0, (0, 1))):
        made = tuner_bench._tuned(tuner_bench._one_tensor, size, {})
        made(torch.empty(8, 32))
        assert (made.hits, made.misses) == expected
        assert made._choice_count() == size


def test_targets():
    def timing(nanoseconds):
        return Timing(nanoseconds, nanoseconds, nanoseconds, 1)

    case = tuner_bench.TunerCase(
        "case",
        {tuner_bench.DIRECT: timing(100), "hit": timing(200), tuner_bench.MISS: timing(900)},
    )
    (target,) = tuner_targets([case])
    assert target.met
    assert target.measured == 0.1
