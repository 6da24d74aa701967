"""``python -m hotop bench --states``: what is called, which state it is in, and what is written."""

import argparse
import json

import pytest
import torch
from rich.console import Console

from hotop.bench import cli, report, states, states_ops, states_report, states_targets
from hotop.bench.contenders import CUSTOM_OP, DEFINE_IMPL, HOTOP, PLAIN
from hotop.bench.states import StateRow, StatesResult
from hotop.bench.states_ops import ATEN, FUNCTION
from hotop.bench.states_threads import KERNELS, NOBODY, THREADS, Lateness, LatenessRow, ThreadsRow
from hotop.bench.timing import Timing

OPS = {PLAIN, CUSTOM_OP, DEFINE_IMPL, HOTOP}
WRAPPED = {states.VMAP, states.FUNCTIONALIZED, states.FUNCTIONAL_MODE, states.FAKE}
KINDS = (states.ACTIVATIONS, states.PARAMETERS)
ONE_BY_ONE = [
    f"{states.FORWARD}, {n} {kind if n > 1 else kind[:-1]}" for kind in KINDS for n in states.COUNTS
]
PAIR = ["Tensor[], Tensor: forward", "Tensor[], Tensor: forward + backward"]


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    path = tmp_path_factory.mktemp("states") / "states.json"
    before = torch.get_num_threads()
    assert cli.run(parser.parse_args(["--states", "--quick", "--json", str(path)])) == 0
    assert torch.get_num_threads() == before
    return json.loads(path.read_text())


def test_rows(document):
    titles = [row["state"] for row in document["states"]]
    assert titles == [
        "no grad required",
        "no_grad, input requires grad",
        "inference_mode",
        "autocast, no rule",
        states.AUTOCAST,
        "device context",
        states.PROFILED,
        states.FORWARD,
        states.BACKWARD,
        states.VMAP,
        states.FUNCTIONALIZED,
        states.FUNCTIONAL_MODE,
        states.FAKE,
        *PAIR,
        *ONE_BY_ONE,
    ]


def test_contenders(document):
    for row in document["states"]:
        title, found = row["state"], set(row["timings"])
        recorded = {FUNCTION} if title in (states.FORWARD, states.BACKWARD) else set()
        if title in (*PAIR, *ONE_BY_ONE):
            assert found == OPS | {FUNCTION}, title
        elif title == states.AUTOCAST:
            assert found == OPS
        else:
            assert found == OPS | {ATEN} | recorded, title
        assert set(row["tax_us"]) == found - {PLAIN}


def test_roads(document):
    for row in document["states"]:
        assert row["direct"] or row["state"] in WRAPPED, row["state"]
        assert row["direct"] == (not row["reason"])


def test_threads(document):
    rows = [(row["kernel"], row["threads"]) for row in document["threads"]]
    assert rows == [(kernel, threads) for kernel in (KERNELS[0], KERNELS[2]) for threads in THREADS]
    for row in document["threads"]:
        for part in ("calls", "median", "best"):
            assert set(row[part]) == OPS
        assert all(calls % max(THREADS) == 0 for calls in row["calls"].values())
        assert all(row["best"][name] >= row["median"][name] > 0 for name in OPS)


def test_lateness(document):
    assert [row["kernel"] for row in document["lateness"]] == list(KERNELS)
    for row in document["lateness"]:
        assert set(row["contenders"]) == OPS | {NOBODY}
        for found in row["contenders"].values():
            assert found["median_us"] <= found["percentile_99_us"]


def test_slopes_and_targets(document):
    slopes = document["us_per_further_argument"]
    spans = ["1 to 4", "4 to 8", "8 to 16", "1 to 16"]
    assert list(slopes) == [f"{kind}, {span}" for kind in KINDS for span in spans]
    assert all(set(slope) == {CUSTOM_OP, DEFINE_IMPL, HOTOP, FUNCTION} for slope in slopes.values())
    assert len(document["targets"]) == 10
    for target in document["targets"]:
        assert target["met"] == (target["measured"] <= target["limit"]), target["title"]


@pytest.mark.parametrize(
    ("make", "tensors", "result", "gradients"),
    [
        (states_ops.make_square, 1, 9.0, [6.0]),
        (states_ops.make_square_transformed, 1, 9.0, [6.0]),
        (lambda: states_ops.make_many(1), 1, 9.0, [6.0]),
        (lambda: states_ops.make_many(3), 3, 9.0, [6.0, None, None]),
    ],
)
def test_contenders_compute_the_same(make, tensors, result, gradients):
    for name, function in make().with_function().items():
        leaves = [torch.full((3,), 3.0, requires_grad=True) for _ in range(tensors)]
        output = function(*leaves)
        assert output.tolist() == [result] * 3, name
        output.sum().backward()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert (leaf.grad is None) == (gradient is None), name
            assert gradient is None or leaf.grad.tolist() == [gradient] * 3, name


def test_list_contenders_compute_the_same():
    for name, function in states_ops.make_list().with_function().items():
        first, second, w = leaves = [
            torch.full((3,), value, requires_grad=True) for value in (2.0, 3.0, 5.0)
        ]
        output = function([first, second], w)
        output.sum().backward()
        assert output.tolist() == [25.0] * 3, name
        assert [leaf.grad[0].item() for leaf in leaves] == [5.0, 5.0, 5.0], name


def test_autocast_rule_casts():
    with torch.autocast("cpu", torch.bfloat16):
        for name, function in states_ops.make_square_autocast().functions.items():
            assert function(torch.ones(3)).dtype == torch.bfloat16, name


def test_wrapped_states():
    """In each of these states the timed calls get what the transform hands to an op."""
    is_wrapped = {
        states.VMAP: torch._C._functorch.is_batchedtensor,
        states.FUNCTIONALIZED: torch._C._functorch.is_functionaltensor,
        states.FUNCTIONAL_MODE: lambda x: type(x).__name__ == "FunctionalTensor",
        states.FAKE: lambda x: type(x).__name__ == "FakeTensor",
    }
    found = [state for state in states._states() if state.title in WRAPPED]
    assert len(found) == len(WRAPPED)
    for state in found:
        with state.enter(*state.arguments) as arguments:
            assert is_wrapped[state.title](arguments[0])
            for name, function in state.functions.items():
                assert is_wrapped[state.title](function(*arguments)), (state.title, name)


def made_up(hotop_us: float) -> StatesResult:
    """Makes a result in which hotop's call takes `hotop_us`, PyTorch's 2 us, the plain one 1 us."""

    def timing(us: float) -> Timing:
        return Timing(us * 1e3, us * 1e3, us * 1e3, 1)

    def row(title: str, more: float = 0.0) -> StateRow:
        timings = {name: timing(2.0) for name in (CUSTOM_OP, DEFINE_IMPL, FUNCTION, ATEN)}
        return StateRow(
            title, True, "", timings | {PLAIN: timing(1.0), HOTOP: timing(hotop_us + more)}
        )

    per_name = dict.fromkeys(OPS, 1.0)
    late = dict.fromkeys((NOBODY, *OPS), Lateness(1.0, 2.0, 10))
    titles = (states.FORWARD, states.BACKWARD, states.PROFILED, states.AUTOCAST, *WRAPPED)
    return StatesResult(
        [row(title) for title in titles],
        {
            kind: {count: row(str(count), 0.05 * count * (hotop_us - 1)) for count in states.COUNTS}
            for kind in KINDS
        },
        [ThreadsRow("kernel", 1, dict.fromkeys(OPS, 8), per_name, per_name)],
        [LatenessRow("kernel", late)],
    )


@pytest.mark.parametrize(("hotop_us", "met"), [(1.05, 10), (4.0, 0)], ids=["all met", "none met"])
def test_targets(hotop_us, met, capsys):
    result = made_up(hotop_us)
    found = states_targets.states_targets(result)
    assert sum(target.met for target in found) == met
    console = Console(width=140)
    states_report.print_states(console, result)
    report.print_targets(console, found, met="met", missed="missed")
    printed = capsys.readouterr().out
    assert printed.count(" met ") == met
    assert printed.count(" missed ") == len(found) - met


def test_slope():
    result = made_up(4.0)
    assert result.slope_us(states.ACTIVATIONS, HOTOP, 1, 16) == pytest.approx(0.15)
    assert result.slopes_us()["activations, 4 to 8"] == pytest.approx(
        {CUSTOM_OP: 0.0, DEFINE_IMPL: 0.0, HOTOP: 0.15, FUNCTION: 0.0, ATEN: 0.0}
    )
