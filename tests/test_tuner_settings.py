"""Settings of the process and random numbers are set back; a tactic that leaves others is out."""

import gc
import os
import random
import sys
import warnings

import pytest
import torch

from hotop.tuner import _process, tunable
from tuner_cases import slow, tune

numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("own_tuner_files")


left = []  # a guard that is freed sets its mode back

GUILTY = {
    "grad mode": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: left.append(torch.inference_mode()) or left[-1].__enter__(),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast for cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "warn_always": lambda: torch.set_warn_always(True),
    "flushing of denormals": lambda: torch.set_flush_denormal(True),
    "float32 matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "mkldnn.enabled": lambda: torch._C._set_mkldnn_enabled(False),
    "garbage collection": gc.disable,
    "thresholds of garbage": lambda: gc.set_threshold(12345, 9, 9),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "the float32 matmul": lambda: torch._C._set_fp32_precision_setter("mkldnn", "matmul", "bf16"),
    "NumPy's error state": lambda: numpy.seterr(divide="raise"),
    "length of numbers": lambda: sys.set_int_max_str_digits(5000),
    "switch interval": lambda: sys.setswitchinterval(0.5),
    "function modes": lambda: torch.overrides.BaseTorchFunctionMode().__enter__(),
    "dispatch modes": lambda: torch.utils._python_dispatch.TorchDispatchMode().__enter__(),
    "working directory": lambda: os.chdir("/"),
}
QUIET = {
    "environment": lambda: os.environ.update(HOTOP_LEFT="1"),
    "warnings filters": lambda: warnings.simplefilter("ignore"),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 7),
}


@pytest.mark.parametrize("what", [*GUILTY, *QUIET])
def test_settings_that_a_tactic_leaves_behind(what):
    def guilty(x):
        y = x + 0
        {**GUILTY, **QUIET}[what]()
        return y

    f = tunable("c::settings", tactics={"guilty": guilty})(slow)
    before = _process.settings()
    found = tune(f, torch.randn(3))
    assert _process.settings() == before
    if what in GUILTY:
        assert what in found.out["guilty"]
        assert found.winner == "default"
    else:  # what a module changes when it is first imported is no reason
        assert not found.out


def test_settings_are_put_back_when_a_tactic_raises():
    def raises(x):
        torch.set_grad_enabled(False)
        raise SystemExit(3)

    f = tunable("c::raises", tactics={"raises": raises})(slow)
    assert "SystemExit" in tune(f, torch.randn(3)).out["raises"]
    assert torch.is_grad_enabled()


def draws(kind):
    return {
        "torch": lambda: torch.rand(3),
        "python": random.random,
        "numpy": numpy.random.rand,
        "seeds": lambda: torch.manual_seed(7),
    }[kind]


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "seeds"])
def test_random_numbers(kind):
    """The default agrees with itself; a tactic that draws otherwise is out; nothing is advanced."""

    def default(x):
        return slow(x) + torch.rand(3) + random.random() + numpy.random.rand()

    def right(x):
        return x + torch.rand(3) + random.random() + numpy.random.rand()

    def wrong(x):
        y = right(x)
        draws(kind)()
        return y

    f = tunable("c::random", tactics={"right": right, "wrong": wrong})(default)
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    x = torch.randn(3)
    before = _process.random_state([])
    expected = default(x)
    after = _process.random_state([])
    before.restore()
    found = tune(f, x)
    assert torch.equal(found.result, expected)
    assert _process.random_state([]).is_equal(after), "one call's numbers are used"
    assert found.winner == "right"
    assert "other random numbers" in found.out["wrong"]


def test_a_generator_that_is_an_argument():
    def default(x, generator):
        return slow(x) + torch.rand(3, generator=generator)

    f = tunable(
        "c::generator",
        ignore=["generator"],
        tactics={
            "right": lambda x, generator: x + torch.rand(3, generator=generator),
            "wrong": lambda x, generator: (
                x + torch.rand(3, generator=generator) + 0 * torch.rand(1, generator=generator)
            ),
        },
    )(default)
    generator = torch.Generator().manual_seed(3)
    twin = torch.Generator().manual_seed(3)
    x = torch.randn(3)
    found = tune(f, x, generator)
    assert torch.equal(found.result, default(x, twin))
    assert torch.equal(generator.get_state(), twin.get_state())
    assert found.winner == "right"
    assert "other random numbers" in found.out["wrong"]
