"""Ops that are redefined, destroyed or replaced while a kernel of theirs runs."""

import pytest

from fault_processes import ends_well


class TestGoneMeanwhile:
    """The op goes while a kernel of it runs: that call ends well, the next says so."""

    @pytest.mark.parametrize("profiled", [False, True])
    @pytest.mark.parametrize("how", ["redefined", "destroyed", "replaced"])
    def test_from_another_thread(self, how: str, profiled: bool) -> None:
        ends_well(
            f"""
how = {how!r}
inside, gone = threading.Event(), threading.Event()
def slow(x: Tensor, ns: list[int]) -> Tensor:
    inside.set()
    assert gone.wait(60)
    return x + 1

def quick(x: Tensor, ns: list[int]) -> Tensor:
    return x + 2

target = hotop.custom_op("processes::gone", slow, mutates_args=())
overload = torch.ops.processes.gone.default
del slow
answers = []
def work():
    with torch.autograd.profiler.profile(enabled={profiled}, record_shapes=True):
        answers.append(target(x, [1, 2, 3]).tolist())
        try:
            answers.append(target(x, [1, 2, 3]).tolist())
        except RuntimeError as error:
            answers.append(str(error))

thread = threading.Thread(target=work)
thread.start()
assert inside.wait(60)
if how == "redefined":
    hotop.custom_op("processes::gone", quick, mutates_args=())
elif how == "destroyed":
    target._lib._destroy()
else:
    target.register_kernel("cpu", quick)
gc.collect()
gone.set()
thread.join()
assert answers[0] == [2.0, 2.0], answers
if how == "destroyed":
    assert "definition of this op was removed" in answers[1], answers
else:
    assert answers[1] == [3.0, 3.0], answers
"""
        )

    def test_while_threads_hammer(self) -> None:
        ends_well(
            """
import random
stop = threading.Event()
wrong = []
def make(k):
    def kernel(x: Tensor, ns: list[int]) -> Tensor:
        return x + k
    return hotop.custom_op("processes::hammered", kernel, mutates_args=())

current = [make(1)]
def work():
    handle = current[0]
    for n in range(10**9):
        if stop.is_set():
            break
        if n % 50 == 0:
            handle = current[0]
        try:
            value = handle(x, [1, 2]).tolist()
        except RuntimeError:  # removed, or PyTorch between the two definitions
            continue
        except AttributeError:
            continue
        if not 1 < value[0] < 100:
            wrong.append(value)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for k in range(60):
    current[0] = make(1 + k)
    if k % 10 == 0:
        gc.collect()
stop.set()
for thread in threads:
    thread.join()
assert not wrong, wrong[:3]
assert current[0](x, []).tolist() == [61.0, 61.0]
"""
        )
