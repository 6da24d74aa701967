"""PyTorch's observers of a call: what they recorded, as plain data to compare."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from twin_observe import normalise

_PYTHON_FRAME = re.compile(r"\(\d+\): |^<built-in|^nn\.Module|^torch/|^<")
_EVENTS_WITHOUT_MEANING = ("[", "profiler", "Profiler", "PyTorch Profiler")
# With stacks, PyTorch's Python tracer can give names that are no text (seen on PyTorch's side).
GARBLED = "names that are no text"
# PyTorch's own observers ask these for strides and can crash in it.
UNOBSERVABLE = ("sparse", "mkldnn", "nested")


def _is_operator(event: Any) -> bool:
    # Not a Python frame: those of PyTorch's wrappers are not in a direct call.
    name = event.name
    return not name.startswith(_EVENTS_WITHOUT_MEANING) and not _PYTHON_FRAME.search(name)


def _parent(event: Any) -> str | None:
    parent = event.cpu_parent
    while parent is not None and not _is_operator(parent):
        parent = parent.cpu_parent
    return None if parent is None else normalise(parent.name)


def _name_around(event: Any, before: list[Any]) -> str | None:
    """Return the name of the innermost operator that ran around an event, by the clock."""
    inside = event.time_range
    around = [
        e
        for e in before
        if e.thread == event.thread
        and e.time_range.start <= inside.start
        and inside.end <= e.time_range.end
    ]
    return around[-1].name if around else None


def _events(profiler: Any) -> list[Any]:
    events = profiler.function_events
    kept = [e for e in (profiler.events() if events is None else events) if _is_operator(e)]
    if getattr(profiler, "with_stack", False):
        # PyTorch's list merges an event with its only child of the same name. With stacks that
        # depends on the frames of its own wrappers in between, which a direct call does not have
        # and which can be lost (below).
        kept = [e for i, e in enumerate(kept) if _name_around(e, kept[:i]) != e.name]
    # With stacks on CPython 3.12 and newer, PyTorch's Python tracer can lose a frame of PyTorch's
    # wrappers, and with it the tree above the operators that the wrapped kernel calls.
    frames_lost = sys.version_info >= (3, 12) and getattr(profiler, "with_stack", False)
    # The numbers of the process mean nothing, their order does.
    numbers = sorted({e.sequence_nr for e in kept if e.sequence_nr >= 0})
    return [
        (
            normalise(event.name),
            str(event.input_shapes),
            str(getattr(event, "concrete_inputs", None)),
            event.sequence_nr if event.sequence_nr < 0 else numbers.index(event.sequence_nr),
            event.scope,
            event.is_async,
            None if frames_lost else _parent(event),
        )
        for event in kept
    ]


def _trace(path: str) -> list[Any]:
    with open(path) as file:  # noqa: PTH123
        nodes = json.load(file)["nodes"]
    found = []
    for node in nodes:
        attributes = {a["name"]: a["value"] for a in node.get("attrs", ())}
        found.append(
            (
                normalise(node["name"]),
                str(node.get("inputs", {}).get("shapes")),
                str(node.get("inputs", {}).get("types")),
                str(node.get("outputs", {}).get("shapes")),
                str(node.get("outputs", {}).get("types")),
                normalise(str(attributes.get("op_schema"))),
                attributes.get("scope"),
            )
        )
    return found


@contextmanager
def _execution_trace(log: list[Any]) -> Iterator[None]:
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    observer = torch.profiler.ExecutionTraceObserver().register_callback(path)
    observer.start()
    try:
        yield
    finally:
        observer.stop()
        observer.unregister_callback()
        log.extend(_trace(path))
        os.unlink(path)  # noqa: PTH108


@contextmanager
def _profiled(profiler: Any, log: list[Any]) -> Iterator[None]:
    try:
        with profiler:
            yield
    finally:
        try:
            log.extend(_events(profiler))
        except UnicodeDecodeError:
            log.append(GARBLED)


OBSERVERS: dict[str, Callable[[list[Any]], Any]] = {
    "shapes": lambda log: _profiled(torch.autograd.profiler.profile(record_shapes=True), log),
    "plain": lambda log: _profiled(torch.autograd.profiler.profile(), log),
    "stack": lambda log: _profiled(
        torch.autograd.profiler.profile(record_shapes=True, with_stack=True), log
    ),
    "modules": lambda log: _profiled(
        torch.autograd.profiler.profile(with_flops=True, with_modules=True, record_shapes=True), log
    ),
    "memory": lambda log: _profiled(torch.autograd.profiler.profile(profile_memory=True), log),
    "trace": _execution_trace,
}
