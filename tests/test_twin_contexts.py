"""Every tensor kind under every mode and guard, twin against twin."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from twin import HOWS, Arguments, needs_hotop
from twin_contexts import BARE, CONTEXTS, TENSORS, WITHOUT_MEMORY, NotATensor, check, defined, t


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("op_name", ["scale", "scale_formula", "bump", "scale_autocast"])
def test_tensor_kinds_in_contexts(op_name: str, context: str) -> None:
    failures = []
    for name, make in TENSORS.items():
        if context in BARE and name in WITHOUT_MEMORY:
            continue
        try:
            check(defined(op_name), lambda m=make: ((m(),), {}), CONTEXTS[context])
        except AssertionError as error:
            failures.append(f"--- {name}\n{error}")
    assert not failures, f"{len(failures)} of {len(TENSORS)} differ\n" + "\n".join(failures)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("op_name", ["many", "many_formula"])
def test_tensor_kinds_in_lists(op_name: str, kind: str) -> None:
    make = TENSORS[kind]
    for context in ("none", "no_grad", "inference_mode", "functions", "dispatches", "autocast"):
        check(defined(op_name), lambda: (([t(), make()],), {}), CONTEXTS[context])
        check(defined(op_name), lambda: (([t()], make()), {}), CONTEXTS[context])
        check(defined(op_name), lambda: (([t()],), {"y": make(), "n": 3}), CONTEXTS[context])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "op_name", ["makes", "modes_inside", "scale_cpu", "many_formula", "bump_autocast"]
)
def test_ops_in_contexts(op_name: str, context: str) -> None:
    listed = op_name.startswith("many")
    for kind in ("plain", "leaf", "parameter", "double", "meta"):
        make = TENSORS[kind]
        check(
            defined(op_name),
            lambda m=make: (([m(), t()],) if listed else (m(),), {}),
            CONTEXTS[context],
        )


@pytest.mark.parametrize("op_name", ["scale", "scale_formula", "bump", "makes"])
@pytest.mark.parametrize("kind", ["plain", "leaf", "meta", "plain_sub", "conj"])
def test_profiler_events_in_contexts(op_name: str, kind: str) -> None:
    for context in ("none", "no_grad", "inference_mode", "autocast", "device_cpu"):
        check(defined(op_name), lambda: ((TENSORS[kind](),), {}), CONTEXTS[context], profile=True)


@pytest.mark.parametrize("position", ["tensor", "int", "keyword", "in_list", "optional"])
def test_torch_function_on_any_argument(position: str) -> None:
    odd = NotATensor
    calls: dict[str, tuple[str, Callable[[], Arguments]]] = {
        "tensor": ("scale", lambda: ((odd(),), {})),
        "int": ("scale", lambda: ((t(), odd()), {})),
        "keyword": ("scale", lambda: ((t(),), {"n": odd()})),
        "in_list": ("many", lambda: (([t(), odd()],), {})),
        "optional": ("many", lambda: (([t()], odd()), {})),
    }
    name, make = calls[position]
    for context in ("none", "no_functions", "no_subclass_functions", "functions", "no_grad"):
        check(defined(name), make, CONTEXTS[context])


def test_fake_tensors() -> None:
    for name in ("scale", "scale_formula", "many_formula", "bump", "makes"):
        for grad in (False, True):
            for context in ("none", "no_grad", "inference_mode", "autocast"):

                def faked(g: bool = grad, n: str = name) -> Arguments:
                    with torch._subclasses.FakeTensorMode():
                        x = torch.ones(2, 2, requires_grad=g)
                        x = x * 1 if g and n == "bump" else x
                        return (([x],) if n.startswith("many") else (x,)), {}

                check(defined(name), faked, CONTEXTS[context])

        @contextmanager
        def converting() -> Iterator[None]:
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                yield

        listed = name.startswith("many")
        make = lambda li=listed: (([t()],) if li else (t(),), {})  # noqa: E731
        check(defined(name), make, torch._subclasses.FakeTensorMode)
        check(defined(name), make, converting)


DIRECT_CONTEXTS = [
    "none",
    "no_grad",
    "enable_grad",
    "inference_mode",
    "autocast",
    "device_cpu",
    "device_meta",
    "default_device_cpu",
    "default_device_meta",
]
DIRECT_KINDS = ["plain", "view", "integer", "double", "parameter_frozen", "buffer", "from_numpy"]


@needs_hotop
@pytest.mark.parametrize("context", DIRECT_CONTEXTS)
@pytest.mark.parametrize("op_name", ["scale", "scale_formula", "scale_cpu", "bump", "many"])
def test_ordinary_calls_are_direct(op_name: str, context: str) -> None:
    twin = defined(op_name)
    for kind in DIRECT_KINDS:
        for how in HOWS:
            make = TENSORS[kind]
            twin.compare(
                lambda m=make: (([m()],) if op_name == "many" else (m(),), {}),
                CONTEXTS[context],
                how,
            )
            assert twin.direct, (kind, how)


@needs_hotop
@pytest.mark.parametrize("context", ["functions", "dispatches", "replace", "stacked"])
def test_calls_that_a_mode_must_see_are_not_direct(context: str) -> None:
    for op_name in ("scale", "bump"):
        twin = defined(op_name)
        twin.compare(lambda: ((t(),), {}), CONTEXTS[context])
        assert twin.direct is False
