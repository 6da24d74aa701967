"""``python -m hotop bench --states``: each state is entered; hotop is direct in all of them."""

import argparse
import json

from hotop.bench import cli


def test_command(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    path = tmp_path / "states.json"
    assert cli.run(parser.parse_args(["--states", "--quick", "--json", str(path)])) == 0
    assert "Tax per call" in capsys.readouterr().out
    rows = json.loads(path.read_text())["states"]
    assert len(rows) == 8
    assert all(row["direct"] for row in rows)
    assert all({"plain", "custom_op", "hotop"} <= set(row["timings"]) for row in rows)
