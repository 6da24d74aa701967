"""What a program started by ``python -m hotop run --report`` prints when it ends."""

import json
from pathlib import Path

import pytest

import hotop
from hotop import _at_exit, _cost_model

ROOT = Path(__file__).resolve().parent.parent


def test_cost_model_is_the_benchmarks() -> None:
    suite = json.loads((ROOT / "benchmarks" / "results" / "suite.json").read_text())
    cases = {case["name"]: case["tax_us"] for case in suite["cases"]}
    ways = {"custom_op": "custom_op", "Library": "define_impl"}
    for (how, mode), points in _cost_model.PYTORCH_TAX.items():
        suffix = "" if mode == "grad" else "-inference_mode"
        for count, tax in points:
            case = cases[f"tensors-{count}{suffix}"]
            assert tax == pytest.approx(case[ways[how]], abs=6e-4)
    for mode, points in _cost_model.DIRECT_TAX.items():
        suffix = "" if mode == "grad" else "-inference_mode"
        for count, tax in points:
            assert tax == pytest.approx(cases[f"tensors-{count}{suffix}"]["hotop"], abs=6e-4)
    assert suite["machine"]["torch"] in _cost_model.SOURCE
    assert suite["machine"]["date"][:10] in _cost_model.SOURCE


def test_boxed_saving_is_measured() -> None:
    file = ROOT / "benchmarks" / "results" / "existing.json"
    saved = {}
    for row in json.loads(file.read_text())["aten"]:
        minima = {who: timing["minimum_ns"] for who, timing in row["timings"].items()}
        saved.setdefault(row["name"], []).append(minima["today"] - minima["accelerated"])
    smallest = {name: min(values) / 1000 for name, values in saved.items()}
    for count, names in ((1, ("dim", "relu", "silu")), (2, ("mm", "bmm", "add.Tensor"))):
        value = _cost_model.saving("C++", "boxed", count).low
        assert value == pytest.approx(min(smallest[name] for name in names), abs=2e-3)


def test_saving() -> None:
    one = _cost_model.saving("custom_op", "direct", 1)
    assert one.low == pytest.approx(4.017 - 0.052)
    assert one.high == pytest.approx(9.030 - 0.055)
    assert _cost_model.saving("custom_op", "direct", 0) == one
    tax = [_cost_model.saving("Library", "direct", count).high for count in range(1, 80)]
    assert tax == sorted(tax)
    assert _cost_model.saving("Library", "direct", 7).high == pytest.approx(
        (1.914 + 2.970) / 2 - (0.059 + 0.079) / 2
    )
    assert _cost_model.saving("Library", "pytorch", 3) == _cost_model.Saving(0.0, 0.0)
    assert _cost_model.saving("C++", "direct", 3) is None
    assert _cost_model.saving("nosuch", "boxed", 3) is None


def test_report_text(monkeypatch) -> None:
    monkeypatch.setattr(_cost_model, "BOXED_SAVING", {"C++": ((1, 2.0),)})
    report = hotop.Report(
        ops=[
            hotop.OpReport("hopgone::f", "custom_op", 2_000_000, 0, 0, 2),
            hotop.OpReport("aten::relu", "C++", 0, 1_000_000, 2, 2),
            hotop.OpReport("hopgone::g", "Library", 0, 30, 0, 2),
        ],
        left={"a::b": "no kernel", "a::c": "no kernel", "a::d": "odd"},
    )
    lines = _at_exit.describe(report, "process 1: x").splitlines()
    assert lines[0] == "hotop: process 1: x"
    assert lines[1] == (
        "hotop: operators called: 3; calls: 3,000,032 (2,000,000 direct, 1,000,030 boxed, "
        "2 by PyTorch)"
    )
    cells = [line.split(maxsplit=5) for line in lines[3:6]]
    assert [(row[0], row[-1]) for row in cells] == [
        ("hopgone::f", "7,930.0 to 17,950.0"),
        ("aten::relu", "2,000.0"),
        ("hopgone::g", "not known"),
    ]
    assert "estimated: 9,930.0 to 19,950.0 ms" in lines[6]
    assert _cost_model.SOURCE in lines[6]
    assert lines[7].endswith("not in the estimate, as nobody measured theirs: 30")
    assert lines[8:] == [
        "hotop: left as they were, with the number of operators:",
        "  2: no kernel",
        "  1: odd",
    ]
    nothing = _at_exit.describe(hotop.Report(), "process 1: x").splitlines()
    assert nothing[1:] == ["hotop: operators called: 0; calls: 0 (0 direct, 0 boxed, 0 by PyTorch)"]


def test_arguments_of_an_operator() -> None:
    assert _at_exit._arguments("aten::add.Tensor") == 2
    assert _at_exit._arguments("aten::relu") == 1
