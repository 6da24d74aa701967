"""``python -m hotop bench --existing``: what is called, on which road, and what is written."""

import argparse
import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from hotop.bench import (
    cli,
    existing,
    existing_aten,
    existing_import,
    existing_models,
    existing_report,
    existing_targets,
    report,
)
from hotop.bench.contenders import PLAIN
from hotop.bench.existing import ExistingResult
from hotop.bench.existing_aten import FUNCTION, MODES, AtenRow
from hotop.bench.existing_import import INSTALLED, PLAIN_IMPORT, ImportRow
from hotop.bench.existing_models import MODULE, Model, ModelRow
from hotop.bench.existing_ops import (
    ACCELERATED,
    CUSTOM_OP,
    DEFINE_IMPL,
    LOOKED_UP,
    MANY,
    OBJECT,
    ONE,
    OVERLOAD,
    PACKET,
    TODAY,
    OpRow,
    contender,
)
from hotop.bench.timing import Timing

REGISTERED = [(by, inputs) for by in (DEFINE_IMPL, CUSTOM_OP) for inputs in (ONE, MANY)]
MODELS = ("BERT", "Llama", "UNet")
ROADS = {"direct", "boxed", "pytorch"}

needs_models = pytest.mark.skipif(
    bool(existing_models.missing_packages()), reason="needs the extra 'models'"
)


def run_bench(*arguments):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(["--existing", "--quick", *arguments]))


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("existing") / "existing.json"
    threads, add = torch.get_num_threads(), type(torch.ops.aten.add.Tensor)
    assert run_bench("--json", str(path)) == 0
    assert torch.get_num_threads() == threads
    # What the measurement accelerates it also restores.
    assert type(torch.ops.aten.add.Tensor) is add
    return json.loads(path.read_text())


def test_ops(document):
    found = [(row["registration"], row["inputs"]) for row in document["ops"]]
    assert found == REGISTERED
    for row in document["ops"]:
        by_object = [OBJECT] if row["registration"] == CUSTOM_OP else []
        assert row["ways"] == [OVERLOAD, PACKET, *by_object, LOOKED_UP]
        calls = {contender(way, who) for way in row["ways"] for who in (TODAY, ACCELERATED)}
        assert set(row["timings"]) == {PLAIN} | calls
        assert set(row["tax_us"]) == set(row["tax_median_us"]) == calls
        assert row["roads"] == dict.fromkeys([OVERLOAD, PACKET, *by_object], "direct")


def test_aten(document):
    names = {row["name"] for row in document["aten"]}
    assert len(names) >= 20
    for mode in MODES:
        assert {row["name"] for row in document["aten"] if row["mode"] == mode} == names
    for row in document["aten"]:
        assert set(row["timings"]) == {FUNCTION, TODAY, ACCELERATED}
        assert row["road"] == "boxed", (row["name"], row["reason"])


@needs_models
def test_models(document):
    assert not document["missing"]
    found = [(row["name"], row["mode"]) for row in document["models"]]
    assert found == [(name, mode) for name in MODELS for mode in MODES]
    for row in document["models"]:
        assert row["equal"], row["name"]
        assert row["calls"] > row["overloads"] > 20
        assert set(row["step"]) == {MODULE, TODAY, ACCELERATED}
        assert set(row["operators"]) == {TODAY, ACCELERATED}
        # Every call of the step was seen, and none was left to PyTorch's entry.
        assert row["roads"] == {"direct": 0, "boxed": row["calls"], "pytorch": 0}, row["name"]


def test_imports(document):
    assert {row["registration"] for row in document["imports"]} == {CUSTOM_OP, DEFINE_IMPL}
    for row in document["imports"]:
        assert set(row["import_ms"]) == {PLAIN_IMPORT, INSTALLED}
        assert len(row["install_ms"]) == len(row["import_ms"][PLAIN_IMPORT]) > 0


def test_targets_of_the_run(document):
    models = 0 if document["missing"] else len(MODELS) * len(MODES)
    assert len(document["targets"]) == 7 + 2 * len(MODES) + models + 2
    for target in document["targets"]:
        at_most = target["relation"] == "at most"
        measured, limit = target["measured"], target["limit"]
        assert target["met"] == (measured <= limit if at_most else measured >= limit)


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, (tuple, list)):
        return all(same(*pair) for pair in zip(first, second, strict=True))
    return first == second


@pytest.mark.parametrize("call", existing_aten.make_calls(), ids=existing_aten._title)
def test_function_and_overload_compute_the_same(call):
    if call.overload is torch.ops.aten.empty_like.default:
        pytest.skip("its values are whatever the memory held")
    expected = call.function(*call.for_function(), **call.keywords)
    twin = existing_aten._twin_of(call.overload)
    assert same(expected, twin(*call.positional, **call.keywords))
    assert twin is not call.overload
    assert type(twin) is torch._ops.OpOverload


def test_twins_stay_as_they_are():
    overload = torch.ops.aten.add.Tensor
    twin = existing_aten._twin_of(overload)
    with existing_aten._accelerated([overload]):
        assert type(twin) is torch._ops.OpOverload
        assert type(overload) is not torch._ops.OpOverload
        assert torch.equal(twin(torch.ones(2), 1), overload(torch.ones(2), 1))
    assert type(overload) is torch._ops.OpOverload


@pytest.mark.parametrize("registration", [CUSTOM_OP, DEFINE_IMPL])
def test_generated_package(registration, tmp_path):
    name = f"hotop_generated_{registration[:6]}"
    (tmp_path / f"{name}.py").write_text(existing_import.make_package(registration, 3, name))
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import torch, {name}\n"
        f"op = torch.ops.{name}.op_2\n"
        "print(op(torch.ones(2), torch.ones(2), 1.0).tolist())\n"
        "print(op(torch.ones(2, device='meta'), torch.ones(2)).device)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["[2.0, 2.0]", "meta"], done.stderr


def test_broken_import_is_told(tmp_path):
    (tmp_path / "hotop_broken.py").write_text("raise ValueError('no such thing')\n")
    with pytest.raises(RuntimeError, match=r"(?s)hotop_broken failed \(plain\).*no such thing"):
        existing_import._import(tmp_path, "hotop_broken", PLAIN_IMPORT)


class Different(torch.nn.Module):
    """A model that exports, with one operator of each road's kind."""

    def forward(self, x):
        return torch.cat([x + 1.5, x.mean(-1, keepdim=True).expand(2, 2)])


def test_model_of_another_shape():
    rows = existing_models.measure_models(
        [Model("small", Different(), (torch.rand(2, 2),))], quick=True
    )
    assert [(row.mode, row.calls, row.overloads, row.equal) for row in rows] == [
        (mode, 4, 4, True) for mode in MODES
    ]


def test_different_bits_fail_the_run(monkeypatch):
    monkeypatch.setattr(existing_models, "_same_bits", lambda expected, found: False)
    rows = existing_models.measure_models(
        [Model("small", Different(), (torch.rand(2, 2),))], quick=True
    )
    failures = ExistingResult([], [], rows, [], []).failures()
    assert failures == [
        f"small, {mode}: the accelerated program's outputs differ" for mode in MODES
    ]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ([torch.ones(2)], [torch.ones(2)], True),
        ([torch.ones(2)], [torch.ones(2) + 1e-7], False),
        ([torch.ones(2)], [], False),
    ],
)
def test_same_bits(first, second, equal):
    assert existing_models._same_bits(first, second) is equal


def test_models_leave_the_random_state():
    if existing_models.missing_packages():
        pytest.skip("needs the extra 'models'")
    before = torch.random.get_rng_state()
    existing_models.make_models(quick=True)
    assert torch.equal(torch.random.get_rng_state(), before)


def made_up(accelerated_us: float, missing: tuple[str, ...] = ()) -> ExistingResult:
    """Makes a result in which an accelerated call takes `accelerated_us` and today's 2 us."""

    def timing(us: float) -> Timing:
        return Timing(us * 1e3, us * 1e3, us * 1e3, 1)

    def op(registration: str, inputs: str) -> OpRow:
        ways = (OVERLOAD, PACKET, *([OBJECT] if registration == CUSTOM_OP else []), LOOKED_UP)
        timings = {PLAIN: timing(0.05)}
        timings |= {contender(way, TODAY): timing(2.0) for way in ways}
        timings |= {contender(way, ACCELERATED): timing(accelerated_us) for way in ways}
        return OpRow(registration, inputs, ways, dict.fromkeys(ways[:-1], "direct"), timings)

    calls = {TODAY: timing(2.0), ACCELERATED: timing(accelerated_us)}
    roads = {"direct": 0, "boxed": 5, "pytorch": 0}
    return ExistingResult(
        [op(*each) for each in REGISTERED],
        [
            AtenRow(name, mode, "boxed", "", calls | {FUNCTION: timing(1.0)})
            for name in ("one", "two")
            for mode in MODES
        ],
        [
            ModelRow(name, mode, 5, 4, True, roads, calls | {MODULE: timing(1.0)}, calls)
            for name in MODELS
            for mode in MODES
            if not missing
        ],
        [
            ImportRow(by, 100, {PLAIN_IMPORT: [1.0], INSTALLED: [accelerated_us * 5]}, [1.0])
            for by in (DEFINE_IMPL, CUSTOM_OP)
        ],
        list(missing),
    )


@pytest.mark.parametrize(
    ("accelerated_us", "met"), [(0.2, 19), (1.9, 0)], ids=["all met", "none met"]
)
def test_targets(accelerated_us, met, capsys):
    result = made_up(accelerated_us)
    found = existing_targets.existing_targets(result)
    assert len(found) == 19
    assert sum(target.met for target in found) == met
    console = Console(width=160)
    existing_report.print_existing(console, result)
    report.print_targets(console, found, met="met", missed="missed")
    printed = capsys.readouterr().out
    assert printed.count(" met ") == met
    assert printed.count(" missed ") == len(found) - met


def test_missing_packages_are_told(capsys):
    result = made_up(0.2, missing=("transformers",))
    assert len(existing_targets.existing_targets(result)) == 13
    existing_report.print_existing(Console(width=160), result)
    assert "transformers not installed; install 'hotop[models]'" in capsys.readouterr().out


def test_the_run_without_the_packages(monkeypatch):
    """Without them nothing of a model is touched, and the result says which are missing."""

    def never(**options):
        raise AssertionError("called")

    monkeypatch.setattr(existing, "missing_packages", lambda: ["diffusers"])
    monkeypatch.setattr(existing, "make_models", never)
    for name in ("measure_ops", "measure_aten", "measure_imports"):
        monkeypatch.setattr(existing, name, lambda **options: [])
    result = existing.measure(quick=True)
    assert (result.missing, result.models, result.failures()) == (["diffusers"], [], [])


def test_geometric_mean():
    result = made_up(0.5)
    rows = result.aten[:2]
    assert existing_aten.geometric_mean_ratio(rows, ACCELERATED, FUNCTION) == pytest.approx(0.5)
    assert result.aten_ratio(MODES[0], TODAY, ACCELERATED) == pytest.approx(4.0)


def test_existing_with_plot(capsys):
    assert run_bench("--plot", "x.png") == 2
    assert "--plot draws the cases or the population" in capsys.readouterr().err
