"""One call, and all that a caller can see of it; and where two calls differ."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from tools.fuzz_tuner import memory
from tools.fuzz_tuner.arguments import Meta, Recipe, entered, tensors_in
from torch import Tensor


@dataclass
class Observed:
    """What was seen: by name, values that compare; and Tensors that are compared with NaN."""

    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """The error in words, empty where there was none."""
        return self.facts.get("error", "")


def settings() -> dict[str, Any]:
    """Return what of the process a call must leave alone."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "determinism": torch.get_deterministic_debug_mode(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly mode": torch.is_anomaly_enabled(),
        "denormals": 5e-324 * float("1") == 0,
        "matmul precision": torch.get_float32_matmul_precision(),
        "garbage collection": gc.isenabled(),
        "switch interval": sys.getswitchinterval(),
        "warnings filters": tuple(map(repr, warnings.filters)),
        "working directory": str(os.getcwd()),  # noqa: PTH109
        "recursion limit": sys.getrecursionlimit(),
    }


def seed_all(seed: int) -> None:
    """Set every random generator."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002


def _random_numbers() -> tuple[Any, ...]:
    words: Any = numpy.random.get_state()  # noqa: NPY002
    return bytes(torch.get_rng_state().numpy()), random.getstate(), words[1].tobytes(), words[2]


def observe(
    function: Callable[..., Any], recipe: Recipe, seed: int, *, alone: bool = True
) -> Observed:
    """Call a function with a recipe's arguments, and look at everything.

    ``alone``: no other thread runs, so that the process's settings and random numbers are this
    call's doing.
    """
    made = recipe.make()
    arguments = tensors_in(list(made.values.values()))
    versions = [None if t.is_inference() else t._version for t in arguments]
    attributes = [dict(t.__dict__) for t in arguments]
    seen = Observed()
    if alone:
        seed_all(seed)
    result = None
    with entered(recipe.context):
        before = settings()
        try:
            result = function(*made.args, **made.kwargs)
        except BaseException as error:
            seen.facts["error"] = f"{type(error).__name__}: {error}"
        after = settings()
        if alone:
            seen.facts["random numbers"] = _random_numbers()
            changed = {k: v for k, v in after.items() if v != before[k]}
            seen.facts["settings changed"] = changed
        _look_at_result(seen, result, arguments)
    _look_at_arguments(seen, made, arguments, versions, attributes)
    return seen


def _look_at_result(seen: Observed, result: Any, arguments: list[Tensor]) -> None:
    seen.facts["result"] = _words(result)
    tensors = tensors_in(result)
    for i, tensor in enumerate(tensors):
        is_argument = [place for place, one in enumerate(arguments) if one is tensor]
        seen.facts[f"form of result {i}"] = {**_form(tensor), "is argument": is_argument}
        if tensor.layout is not torch.strided:
            continue
        relations = [
            ("argument", place, _distance(tensor, one)) for place, one in enumerate(arguments)
        ]
        relations += [("result", j, _distance(tensor, tensors[j])) for j in range(i)]
        seen.facts[f"memory of result {i}"] = [one for one in relations if one[2] is not None]
        seen.tensors[f"values of result {i}"] = tensor.detach().clone()


def _form(tensor: Tensor) -> dict[str, Any]:
    is_strided = tensor.layout is torch.strided
    return {
        "class": type(tensor),
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "strides": tensor.stride() if is_strided else None,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "conj": tensor.is_conj(),
        "neg": tensor.is_neg(),
        "inference": tensor.is_inference(),
        "layout": tensor.layout,
    }


def _distance(a: Tensor, b: Tensor) -> int | None:
    if a.numel() == 0 or b.numel() == 0:
        return None
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return a.data_ptr() - b.data_ptr() if same else None


def _words(value: Any) -> str:
    """Return a value in words that say nothing of what Tensors hold."""
    if isinstance(value, Tensor):
        return "Tensor"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_words, value))})"
    if type(value) is dict:
        return f"dict({', '.join(f'{key}={_words(one)}' for key, one in value.items())})"
    return f"{type(value).__name__} {value!r:.60}"


def _look_at_arguments(
    seen: Observed,
    made: Any,
    arguments: list[Tensor],
    versions: list[int | None],
    attributes: list[dict[str, Any]],
) -> None:
    places = {id(tensor): f"Tensor {i}" for i, tensor in enumerate(arguments)}
    for name, value in made.values.items():
        seen.facts[f"contents of {name}"] = _contents(value, places)
    for i, tensor in enumerate(arguments):
        room = next((r for r in made.rooms if _is_in(tensor, r)), None)
        form = _form(tensor)
        form["place"] = None if room is None else tensor.storage_offset()
        form["attributes"] = {**tensor.__dict__} == attributes[i]
        form["has grad"] = tensor.is_leaf and tensor.grad is not None
        if versions[i] is not None:
            form["is changed"] = tensor._version != versions[i]
        seen.facts[f"argument {i}"] = form
    for i, room in enumerate(made.rooms):
        raw = memory.bytes_of(room).clone()
        dtype = room.dtype if room.dtype is not torch.bool else torch.uint8
        whole = raw[: raw.numel() // room.element_size() * room.element_size()]
        seen.tensors[f"memory {i}"] = whole.view(dtype)


def _is_in(tensor: Tensor, room: Tensor) -> bool:
    return tensor.untyped_storage()._cdata == room.untyped_storage()._cdata


def _contents(value: Any, places: dict[int, str]) -> str:
    if isinstance(value, Tensor):
        return places.get(id(value), "another Tensor")
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(_contents(one, places) for one in value)})"
    if type(value) is dict:
        return str({key: _contents(one, places) for key, one in value.items()})
    if type(value) is Meta:
        return f"Meta {value.name} {_contents(value.lengths, places)}"
    if type(value) is torch.Generator:
        return str(hash(bytes(value.get_state().numpy())))
    return repr(value)


def differences(ours: Observed, theirs: Observed, *, exact: bool) -> list[str]:
    """Return where two calls differ, in words."""
    found = []
    for name in {**ours.facts, **theirs.facts}:
        a, b = ours.facts.get(name), theirs.facts.get(name)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            parts = [key for key in {**a, **b} if a.get(key) != b.get(key)]
            found += [f"{name}: {key}: {a.get(key)!r} instead of {b.get(key)!r}" for key in parts]
        else:
            found.append(f"{name}: {_short(a)} instead of {_short(b)}")
    for name in ours.tensors.keys() & theirs.tensors.keys():
        if not _equal(ours.tensors[name], theirs.tensors[name], exact=exact):
            found.append(f"{name}: {_short(ours.tensors[name])} not {_short(theirs.tensors[name])}")
    return found


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.flatten().tolist()[:12]}"
    return f"{value!r:.200}" if not isinstance(value, tuple) else "others"


def _equal(a: Tensor, b: Tensor, *, exact: bool) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        return False
    # Of gaps too: whatever bits are there, a NaN stays one.
    tolerance = 0.0 if exact else 1e-5
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return torch.allclose(a, b, rtol=tolerance, atol=0.0, equal_nan=True)
