"""Scripts that run in a process of their own, and must end well."""

import subprocess
import sys

HEAD = """
import atexit, gc, os, sys, threading, time, weakref
import torch, hotop
from torch import Tensor

def body(x: Tensor, ns: list[int]) -> Tensor:
    wait()
    return x + len(ns)

def wait():
    pass

def plain(x: Tensor, k: float = 1.0) -> Tensor:
    wait()
    return x + k

op = hotop.custom_op("processes::op", body, mutates_args=())
tuned = hotop.tunable("processes::tuned")(plain)
tuned_op = hotop.custom_op("processes::tuned_op", tuned, mutates_args=())
x = torch.ones(2)
leaf = torch.ones(2, requires_grad=True)
recorded = hotop.custom_op("processes::recorded", body, mutates_args=())
recorded.register_autograd(
    lambda ctx, grad: (grad, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
cast = hotop.custom_op("processes::cast", body, mutates_args=())
cast.register_autocast("cpu", torch.bfloat16)

def under_autocast():
    with torch.autocast("cpu"):
        return cast(x, [1, 2, 3])

CALLS = [
    lambda: op(x, [1, 2, 3]),
    lambda: op(ns=(1, 2, 3), x=x),
    lambda: torch.ops.processes.op(x, [1, 2, 3]),
    lambda: tuned(x, 3.0),
    lambda: tuned_op(x, 3.0),
    lambda: recorded(leaf, [1, 2, 3]),
    under_autocast,
]

def check():
    for call in CALLS:
        assert call().tolist() == [4.0, 4.0]
    with torch.autograd.profiler.profile():
        for call in CALLS:
            assert call().tolist() == [4.0, 4.0]

check()
"""


def run(script: str, head: str = HEAD, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", head + script],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def ends_well(script: str, head: str = HEAD) -> str:
    done = run(script, head)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
