"""``python -m hotop bench --nvfp4``: the command runs; the rows say what was computed."""

import argparse
import json

import pytest

from hotop.bench import cli, nvfp4_bench
from hotop.bench.targets import nvfp4_targets
from hotop.bench.timing import Timing


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(nvfp4_bench, "GEMM_SHAPES", ((16, 64, 64), (1, 32, 32)))
    monkeypatch.setattr(nvfp4_bench, "QUANTIZE_SHAPES", ((16, 64), (2, 32)))
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    path = tmp_path / "nvfp4.json"
    assert cli.run(parser.parse_args(["--nvfp4", "--quick", "--json", str(path)])) == 0
    assert "NVFP4 kernels" in capsys.readouterr().out
    rows = json.loads(path.read_text())["nvfp4"]["rows"]
    assert {row["op"] for row in rows} == {"quantize", "gemm"}
    assert all({"default"} < set(row["timings"]) for row in rows)


def test_rates_and_targets():
    def timing(nanoseconds):
        return Timing(nanoseconds, nanoseconds, nanoseconds, 1)

    large, small = nvfp4_bench.QUANTIZE_SHAPES[:2]
    rows = [
        nvfp4_bench.KernelRow("quantize", large, "bfloat16", 1, {"avx2": timing(4194304 / 2)}),
        nvfp4_bench.KernelRow(
            "quantize", small, "bfloat16", 1, {"PyTorch": timing(2000), "default": timing(100)}
        ),
        nvfp4_bench.KernelRow(
            "gemm",
            nvfp4_bench.GEMM_SHAPES[0],
            "float32",
            1,
            {nvfp4_bench.LINEAR: timing(95), "default": timing(100)},
        ),
    ]
    found = nvfp4_targets(nvfp4_bench.NVFP4Result("avx2", rows))
    assert [target.measured for target in found] == pytest.approx([2.0, 20.0, 0.95])
    assert [target.met for target in found] == [True, False, True]
    assert rows[2].rate("default") == pytest.approx(2 * 256 * 2048 * 2048 / 100)
