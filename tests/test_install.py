"""``hotop.install`` and ``uninstall``: ops that are made or exist while it is in force."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload

import hotop
from twin_existing import roads

A = torch.ops.aten


pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("existing", "FRAGMENT")
    yield made
    made._destroy()


def plain_op(name: str) -> CustomOpDef:
    def plain(x: Tensor) -> Tensor:
        return x.clone()

    return torch.library.custom_op(name, plain, mutates_args=())


class TestInstall:
    def test_new_ops_are_made_by_hotop(self, library: torch.library.Library) -> None:
        from torch.library import custom_op as imported_before

        with hotop.install() as installation:
            assert isinstance(installation, hotop.Installation)

            @imported_before("existing::new", mutates_args=())
            def new(x: Tensor) -> Tensor:
                return x.clone()

            @torch.library.triton_op("existing::tri", mutates_args=())
            def tri(x: Tensor) -> Tensor:
                return x.clone()

            library.define("helper(Tensor x) -> Tensor")
            library.impl("helper", lambda x: x.clone(), "CPU")
            x = torch.ones(1)
            assert hotop.explain(new, x).direct
            assert hotop.explain(tri, x).direct
            assert roads(torch.ops.existing.helper, x) == ("direct", "direct")
            assert type(A.tan.default) is OpOverload, "C++ ops are left"
            names = {op.name: op for op in hotop.report().ops}
            assert names["existing::helper"].how == "Library"
            assert names["existing::helper"].direct == 1
        assert type(torch.ops.existing.helper.default) is OpOverload

        @torch.library.custom_op("existing::plain", mutates_args=())
        def plain(x: Tensor) -> Tensor:
            return x.clone()

        assert type(plain) is CustomOpDef
        assert hotop.explain(new, x).direct, "what hotop made stays hotop's"

    def test_existing_ops_and_twice(self, library: torch.library.Library) -> None:
        @torch.library.custom_op("existing::before", mutates_args=())
        def before(x: Tensor) -> Tensor:
            return x.clone()

        library.define("old(Tensor x) -> Tensor")
        library.impl("old", lambda x: x.clone(), "CPU")
        held = torch.ops.existing.old.default
        hotop.install()
        hotop.install()
        assert hotop.explain(before, torch.ones(1)).direct
        assert roads(held, torch.ones(1)) == ("direct", "direct")
        hotop.uninstall()
        hotop.uninstall()
        assert type(before) is CustomOpDef
        assert type(held) is OpOverload

    def test_a_block_that_changed_nothing_undoes_nothing(self) -> None:
        with hotop.install():
            with hotop.install():
                pass
            op = plain_op("existing::nested")
            assert type(op) is not CustomOpDef
        op = plain_op("existing::after")
        assert type(op) is CustomOpDef

    def test_registrations_after(self) -> None:
        @torch.library.custom_op("existing::reg", mutates_args=())
        def reg(x: Tensor) -> Tensor:
            return x.clone()

        hotop.install()
        reg.register_kernel("cpu", lambda x: x + 1)
        x = torch.ones(1)
        assert reg(x).item() == 2
        with reg.set_kernel_enabled("cpu", False):
            assert reg(x).item() == 1
        torch.library.register_autograd(reg, lambda ctx, g: g * 7)
        leaf = torch.ones(1, requires_grad=True)
        reg(leaf).backward()
        assert leaf.grad is not None
        assert leaf.grad.item() == 7
        assert hotop.explain(reg, leaf).direct

    def test_without_a_core(self) -> None:
        program = (
            "import warnings, torch, hotop\n"
            "with warnings.catch_warnings(record=True) as caught:\n"
            "    warnings.simplefilter('always')\n"
            "    with hotop.install(): pass\n"
            "    hotop.accelerate('aten'); hotop.restore(); hotop.uninstall()\n"
            "print([str(w.message) for w in caught])\n"
            "print(hotop.report())\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**__import__("os").environ, "HOTOP_DISABLE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "hotop.install does nothing: hotop is switched off by HOTOP_DISABLE" in done.stdout
        assert "everything: hotop is switched off" in done.stdout
