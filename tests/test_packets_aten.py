"""ATen's own packets: an overload joins them, and what PyTorch keeps under them stays found."""

import subprocess
import sys

import pytest

# In processes of their own: PyTorch makes another packet when an overload goes, ATen's too.
ATEN = """
import torch, hotop
from torch.utils.flop_counter import FlopCounterMode

X, held = torch.ones(2), getattr(torch.ops.aten, NAME)
table, default = {held: 1}, held.default
decompositions = torch._decomp.core_aten_decompositions()
before = {op for op in decompositions if isinstance(op, torch._ops.OpOverload)}

def flops():
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(torch.mm(a, b), torch.full((2, 4), 3.0))
    return counter.get_total_flops()

def check():
    assert getattr(torch.ops.aten, NAME) is held
    assert held.default is default
    assert table[getattr(torch.ops.aten, NAME)] == 1
    assert all(op in decompositions for op in before)
    assert flops() == expected == 48
    if hasattr(held, "mine"):
        assert held(X, "a")[0].item() == held.mine(X, "a")[0].item() == 2
        assert held(X[None], "a").shape == (1, 2)

expected = flops()
check()
FIRST()
check()
SECOND()
check()
THIRD()
check()
hotop.restore()
check()
"""
ATEN_WAYS = {
    "hotop": """
def DEFINE():
    global mine
    @hotop.custom_op(f"aten::{NAME}.mine", mutates_args=())
    def mine(x: torch.Tensor, word: str) -> torch.Tensor:
        return x + len(word)
""",
    # PyTorch's hash is another one after this if the packet is not accelerated.
    "library": """
def DEFINE():
    global library
    library = torch.library.Library("aten", "FRAGMENT")
    library.define(f"{NAME}.mine(Tensor x, str word) -> Tensor")
    library.impl(f"{NAME}.mine", lambda x, word: x + len(word), "CPU")
""",
}


@pytest.mark.parametrize("name", ["mm", "relu", "cosh"])
@pytest.mark.parametrize(
    ("way", "steps"),
    [
        ("hotop", "DEFINE ACCELERATE hotop.install"),
        ("hotop", "ACCELERATE DEFINE hotop.install"),
        ("hotop", "hotop.install DEFINE ACCELERATE"),
        ("library", "ACCELERATE DEFINE hotop.install"),
        ("library", "ACCELERATE hotop.install DEFINE"),
    ],
)
def test_atens_packets(name: str, way: str, steps: str) -> None:
    program = f"NAME = {name!r}\nACCELERATE = lambda: hotop.accelerate('aten')\n"
    program += "import torch, hotop\n" + ATEN_WAYS[way] + ATEN
    for word, step in zip(("FIRST", "SECOND", "THIRD"), steps.split(), strict=True):
        program = program.replace(f"{word}()", f"{step}()")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
