"""A short run of the differential test of the boxed road, and proof that it finds broken ones."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hotop
import seeds
from twin import needs_hotop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.boxed import campaign, overloads, record  # noqa: E402
from tools.boxed.compare import SPOILS, Case, accelerated, compare  # noqa: E402
from tools.boxed.copies import copied  # noqa: E402
from tools.boxed.states import PLAIN, State  # noqa: E402

ops = torch.ops.aten
# Small samples, many overloads behind them.
OP_DB = ("add", "cat", "sum", "index_put", "nn.functional.layer_norm", "std_mean", "split")


def words(totals: campaign.Totals, seed: int) -> str:
    """Return all that is needed to make the differing calls again."""
    return "\n".join(
        "\n".join([f"--seed {seed} --replay '{found.replay}'", found.title, *found.lines])
        for found in totals.findings
    )


@needs_hotop
def test_a_short_run_finds_no_difference() -> None:
    seed = seeds.seed(3)
    names = random.Random(seed).sample(overloads.dispatcher_names(), 40)
    items = [*(f"op_db/{name}" for name in OP_DB), *(f"schema/{name}" for name in names)]
    totals = campaign.run_campaign(items, seed=seed, number=2, cap=8)
    assert not totals.findings, words(totals, seed)
    boxed = sum(tally["boxed"] for tally in totals.overloads.values())
    assert totals.counts["calls"] > 300
    assert boxed > 200, "hardly a call took the boxed road"


def test_the_samples_of_op_db_reach_overloads() -> None:
    calls = record.recorded("add")
    for name in ("aten::add.Tensor", "aten::add_.Tensor", "aten::add.out", "aten::add.Scalar"):
        assert calls[name], name


def test_copies_keep_strides_aliases_and_flags() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    given = [base.t()[1:], base, torch.nn.Parameter(torch.ones(2)), torch.ones(1).expand(3)]
    (row, whole, parameter, expanded), kwargs = copied([*given], {"again": base})
    assert row.stride() == (1, 4)
    assert row.storage_offset() == 1
    assert row.untyped_storage()._cdata == whole.untyped_storage()._cdata
    assert whole.untyped_storage()._cdata != base.untyped_storage()._cdata
    assert kwargs["again"] is whole
    assert type(parameter) is torch.nn.Parameter
    assert expanded.stride() == (0,)


def x() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


# For each break a call on which it shows.
CASES: dict[str, Callable[[], tuple[Any, Any, tuple[str, ...], State]]] = {
    "adds one": lambda: (ops.mul.Tensor, ((x(), x()), {}), (), PLAIN),
    "copies": lambda: (ops.max.dim, ((x(), 1), {}), (), PLAIN),
    "detaches": lambda: (ops.mul.Tensor, ((x(), x()), {}), ("requires grad",), PLAIN),
    "other text": lambda: (ops.mm.default, ((x(), x()), {}), (), PLAIN),
    "other type": lambda: (ops.mm.default, ((x(), x()), {}), (), PLAIN),
    "no version bump": lambda: (ops.add_.Tensor, ((x(), x()), {}), (), PLAIN),
    "leaks grad mode": lambda: (ops.mul.Tensor, ((x(), x()), {}), (), PLAIN),
    "no event": lambda: (ops.mul.Tensor, ((x(), x()), {}), (), State(profile=True)),
    "runs twice": lambda: (ops.add_.Tensor, ((x(), x()), {}), (), PLAIN),
    "last keyword ignored": lambda: (ops.add.Tensor, ((x(), x()), {"alpha": 3}), (), PLAIN),
    "no function modes": lambda: (
        *(ops.mul.Tensor, ((x(), x()), {}), ()),
        State(("functions",)),
    ),
    "no grad": lambda: (ops.mul.Tensor, ((x(), x()), {}), ("requires grad",), PLAIN),
    "tuples for lists": lambda: (ops.split.Tensor, ((x(), 1), {}), (), PLAIN),
    "not the input itself": lambda: (ops.add_.Tensor, ((x(), x()), {}), (), PLAIN),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What a test accelerates is PyTorch's again behind it."""
    yield
    if hasattr(hotop, "restore"):
        hotop.restore()


def case(name: str) -> Case:
    op, arguments, edits, state = CASES[name]()
    return Case(op, arguments, edits, state, "1")


@needs_hotop
@pytest.mark.parametrize("spoil", sorted(SPOILS))
def test_a_broken_boxed_road_is_found(spoil: str) -> None:
    broken = case(spoil)
    with accelerated(broken.op, "") as roads:
        lines, _, _ = compare(broken)
        assert not lines, lines
        found, _, _ = compare(broken, spoil)
    assert found, f"{spoil}: not found"
    assert roads["boxed"] + roads["pytorch"] > 0


@needs_hotop
def test_a_crash_belongs_to_its_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A worker that dies in one call of the fast side; the calls behind it are still compared.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "sys.path.insert(0, os.environ['HOTOP_TEST_ROOT'])\n"
        "import tools.boxed.compare as compare\n"
        "def dies(self, spoil, sides=compare.Case.sides):\n"
        "    if spoil != 'PyTorch' and self.seed.endswith('aten::neg/1/0'):\n"
        "        os.abort()\n"
        "    return sides(self, spoil)\n"
        "compare.Case.sides = dies\n"
    )
    monkeypatch.setattr(campaign, "TRIES", 1)
    monkeypatch.setenv("HOTOP_TEST_ROOT", str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    totals = campaign.run_campaign(["schema/aten::neg"], seed=3, number=1)
    assert [found.replay for found in totals.findings] == ["schema/aten::neg:aten::neg/1/0"]
    assert "only when accelerated" in totals.findings[0].title
    assert totals.counts["calls"] > 3
