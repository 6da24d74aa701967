"""Each thread's own state decides its calls, and is as it was after them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import hotop


@hotop.custom_op("threads::f", mutates_args={"log"})
def f(x: Tensor, log: Tensor) -> Tensor:
    log += 1
    return x * 2


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen += func is torch.ops.threads.f.default
        return func(*args, **(kwargs or {}))


def state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
    )


def plain(log: Tensor) -> None:
    for _ in range(300):
        assert f(torch.ones(1), log).item() == 2


def inference(log: Tensor) -> None:
    with torch.inference_mode():
        for _ in range(300):
            assert f(torch.ones(1), log).is_inference()


def counted(log: Tensor) -> None:
    with Counting() as mode:
        for _ in range(300):
            f._opoverload(torch.ones(1), log)
    assert mode.seen == 300


def raising(log: Tensor) -> None:
    for _ in range(300):
        try:
            f(torch.ones(1), "log")
        except RuntimeError:
            continue
        raise AssertionError("a str was taken for a Tensor")


def run(body: Callable[[Tensor], None]) -> None:
    log = torch.zeros(1)
    before = state()
    body(log)
    assert state() == before
    assert log.item() == (0 if body is raising else 300)


def test_threads_do_not_see_each_other() -> None:
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(run, body) for body in (plain, inference, counted, raising) * 4]:
            done.result()


def test_kernels_are_replaced_while_others_call() -> None:
    op = hotop.custom_op("threads::replaced", lambda_body, mutates_args=())
    stop = threading.Event()
    wrong: list[float] = []

    def call() -> None:
        while not stop.is_set():
            value = op(torch.zeros(1)).item()
            if value not in (1.0, 2.0, 3.0):
                wrong.append(value)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_ in range(200):
        op.register_kernel("cpu", lambda x, k=2 + round_ % 2: x + k)
        with op.set_kernel_enabled("cpu", False):
            pass
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def lambda_body(x: Tensor) -> Tensor:
    return x + 1
