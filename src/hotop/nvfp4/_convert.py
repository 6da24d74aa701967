"""``convert`` and ``record_amax``: the linear layers of a model in NVFP4, all or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hotop.nvfp4._linear import NVFP4Linear, global_scale
from hotop.nvfp4._selection import Found, find_linears

Predicate = Callable[[str, nn.Linear], bool]

# What an NVFP4Linear has of its own; all else is taken over from the layer: hooks, training, what
# users put on it.
_OWN = {
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "in_features",
    "out_features",
}


class Conversion(NamedTuple):
    """What :func:`convert` did.

    Attributes:
        converted: The names of the layers that were replaced.
        left: The names of the other ``nn.Linear``, of subclasses too, and why they were left.
    """

    converted: list[str]
    left: dict[str, str]


@contextmanager
def record_amax(model: nn.Module, predicate: Predicate | None = None) -> Iterator[dict[str, float]]:
    """Record the largest magnitude of each linear layer's input while calibration data runs.

    Args:
        model: Its ``nn.Linear`` are watched, itself too if it is one.
        predicate: From name and layer: whether to watch it; None: all that :func:`convert` would
            replace.

    Yields:
        The largest magnitude so far, by the layer's name; NaN once one was NaN. For
        :func:`convert`.
    """
    amax: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            input = args[0] if args else kwargs.get("input")
            # Of anything else the layer says that it is wrong.
            if isinstance(input, Tensor) and input.is_floating_point() and input.numel():
                found, known = float(input.detach().abs().amax()), amax.get(name, 0.0)
                amax[name] = known if found <= known or math.isnan(known) else found

        return hook

    if type(model) is nn.Linear:
        watched = [("", model)] if predicate is None or predicate("", model) else []
    else:
        chosen, _ = _choose(find_linears(model), predicate)
        watched = [(found.names[0], found.linear) for found in chosen]
    handles = [
        linear.register_forward_pre_hook(watch(name), with_kwargs=True) for name, linear in watched
    ]
    try:
        yield amax
    finally:
        for handle in handles:
            handle.remove()


def convert(
    model: nn.Module,
    predicate: Predicate | None = None,
    amax: Mapping[str, float] | None = None,
) -> Conversion:
    """Replace linear layers of a model by :class:`NVFP4Linear`, in place: all chosen, or none.

    The new layer takes over the bias, the hooks, the training flag and whatever else was set on
    the layer, under all its names. Left alone, whatever ``predicate`` says, are layers that do
    more than an ``nn.Linear`` or are not called as one: of a subclass, with a ``forward`` of their
    own, parametrized, under ``weight_norm``, ``spectral_norm`` or pruning, and those whose weight
    the code of a module above reads (``nn.TransformerEncoderLayer``).

    Args:
        model: Its ``nn.Linear``, below it: itself it cannot replace.
        predicate: From name and layer: whether to replace it; asked for each name. None: all that
            NVFP4 can hold and whose weight no other module shares.
        amax: Largest input magnitudes by name, of :func:`record_amax`; layers without one get
            the input scale 1.

    Returns:
        The names of the layers that were replaced, and why the others were left.

    Raises:
        ValueError: ``predicate`` chose a layer that NVFP4 cannot hold (see
            :meth:`NVFP4Linear.from_linear`) or whose weight is shared; a weight is not finite; an
            ``amax`` is no finite number or its name that of no linear layer; the model itself is
            an ``nn.Linear``. Nothing has been changed then.
    """
    if type(model) is nn.Linear:
        raise ValueError(
            "the model is an nn.Linear itself, which convert cannot replace in place: use "
            "NVFP4Linear.from_linear"
        )
    largest = _amax_of_layers(model, amax or {})
    chosen, left = _choose(find_linears(model), predicate)
    refused = [
        f"{found.names[0]}: {found.not_replaceable}" for found in chosen if found.not_replaceable
    ]
    if refused:
        raise ValueError(f"nothing was converted: {'; '.join(refused)}")
    made = [_quantized(found, largest.get(id(found.linear))) for found in chosen]
    for found, new in zip(chosen, made, strict=True):
        for parent, name in found.slots:
            parent._modules[name] = new
    return Conversion([name for found in chosen for name in found.names], left)


def _choose(
    linears: list[Found], predicate: Predicate | None
) -> tuple[list[Found], dict[str, str]]:
    """Split layers in those to replace and, by name, why not the others."""
    chosen, left = [], {}
    for found in linears:
        why = found.not_like_linear
        if why is None:
            if predicate is None:
                why = found.not_replaceable
            # Each name is asked, and one that is wanted is enough.
            elif not any([predicate(name, found.linear) for name in found.names]):
                why = "predicate did not choose it"
        if why is None:
            chosen.append(found)
        else:
            left.update(dict.fromkeys(found.names, why))
    return chosen, left


def _amax_of_layers(model: nn.Module, amax: Mapping[str, float]) -> dict[int, float]:
    """The largest magnitude by layer; of two names of one layer, the larger."""
    found: dict[int, float] = {}
    unknown = []
    for name, value in amax.items():
        try:
            module = model.get_submodule(str(name))
        except AttributeError:
            module = None
        if not isinstance(module, nn.Linear | NVFP4Linear):
            unknown.append(str(name))
            continue
        try:
            number = float(value)
            global_scale(torch.tensor(number, device="cpu"))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"amax of {name}: {error}") from None
        found[id(module)] = max(number, found.get(id(module), 0.0))
    if unknown:
        raise ValueError(f"amax has names that are no linear layer's: {', '.join(unknown)}")
    return found


def _quantized(found: Found, amax: float | None) -> NVFP4Linear:
    linear = found.linear
    scale = None
    if amax is not None:
        scale = global_scale(torch.tensor(amax, device=linear.weight.device))
    try:
        new = NVFP4Linear.from_linear(linear, scale)
    except ValueError as error:
        raise ValueError(f"{found.names[0]}: {error}") from None
    new._parameters["bias"] = linear.bias  # itself: it may be tied, or an optimizer hold it
    new.__dict__.update({key: value for key, value in vars(linear).items() if key not in _OWN})
    return new
