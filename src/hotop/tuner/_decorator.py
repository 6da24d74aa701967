"""``hotop.tunable``: a function with several tactics, of which each call takes the tuned one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hotop.tuner._buckets import Bucket
from hotop.tuner._judge import Check
from hotop.tuner._key import Parameter
from hotop.tuner._signature import Tactic, names
from hotop.tuner._tunable import Tunable


def tunable(
    name: str | None = None,
    *,
    dims: Mapping[str, Mapping[int, Bucket]] | None = None,
    ignore: Iterable[str] = (),
    choices: str | None = None,
    tactics: Mapping[str, Callable[..., Any] | Tactic] | None = None,
    default: str = "default",
    default_backends: Iterable[str] = (),
    reference: Callable[..., Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    mutates_args: str | Iterable[str] = (),
    version: str | int = "",
) -> Callable[[Callable[..., Any]], Tunable]:
    """Make a function the default of several tactics, of which each call takes the tuned one.

    The result is a kernel: give it to :func:`hotop.custom_op`, ``torch.library.custom_op``,
    ``Library.impl`` or :func:`hotop.fast_custom_op` like any function, or call it.

    What decides is the call's key: of every Tensor the dtype, device, sizes, kinds of strides and
    whether its data are aligned to 16 bytes; of every other argument the value (docs/tuner.md has
    the rule). Calls with a value that has no place in a key (Tensors that are sparse, nested,
    quantized, conjugated or negated views, of a subclass, or seen by a functorch transform; objects
    that are no schema's argument; very long lists) are not tuned: the default serves them. Tune
    with :func:`tuning`.

    Args:
        name: The name in files, best the op's; None: module and name of the function.
        dims: Bucket rules by parameter and dimension (negative: from the end), for instance
            ``{"x": {0: power_of_two(cap=8192)}}``. Dimensions without a rule are exact.
        ignore: Parameters that no tactic's speed or ability depends on.
        choices: The str parameter that lists the allowed backends, separated by commas.
        tactics: The other tactics by name: functions with the same parameters, or `Tactic`.
        default: The default tactic's name.
        default_backends: The backends that must be allowed for it.
        reference: The function that a tactic's result must equal before it may win; None: the
            default tactic.
        rtol: Relative tolerance of that comparison; None: PyTorch's for the dtype.
        atol: Absolute tolerance of that comparison; None: PyTorch's for the dtype, times the median
            magnitude of the results where that is below 1.
        mutates_args: Parameters whose Tensors the function changes, or ``"unknown"``: all of them.
        version: Change it with the tactics: choices that were measured with another one are not
            used.

    Raises:
        ValueError: A name that is not a parameter, or one of two tactics; a tactic with other
            parameters or defaults; a str other than ``"unknown"`` for ``mutates_args``.
        TypeError: The function has parameters that a key cannot hold (``*args``, ``**kwargs``).

    Example:
        >>> import torch, hotop
        >>> def by_matmul(x: torch.Tensor) -> torch.Tensor:
        ...     return x @ x.new_ones(x.shape[-1])
        >>> @hotop.tunable(dims={"x": {0: hotop.tuner.power_of_two()}},
        ...                tactics={"matmul": by_matmul})
        ... def row_sums(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sum(-1)
        >>> row_sums(torch.ones(2, 3))
        tensor([3., 3.])
    """

    def decorate(function: Callable[..., Any]) -> Tunable:
        parameters = _parameters(function, dims or {}, set(ignore), mutated)
        own_name = name or f"{function.__module__}.{function.__qualname__}"
        known = {parameter.name for parameter in parameters}
        asked = {*(dims or {}), *ignore, *(mutated or ()), *([choices] if choices else [])}
        if asked - known:
            raise ValueError(f"{own_name} has no parameter {', '.join(sorted(asked - known))}")
        made = Tunable(
            function,
            own_name,
            parameters,
            choices,
            default,
            tuple(default_backends),
            Check(reference, rtol, atol),
            str(version),
        )
        for tactic_name, tactic in (tactics or {}).items():
            made._add(tactic_name, tactic if isinstance(tactic, Tactic) else Tactic(tactic))
        return made

    ignore = names("ignore", ignore)
    default_backends = names("default_backends", default_backends)
    _check_dims(dims)
    mutated: set[str] | None = None  # all of them
    if not isinstance(mutates_args, str):
        mutated = set(names("mutates_args", mutates_args))
    elif mutates_args != "unknown":
        raise ValueError(f'mutates_args must be names or "unknown", got {mutates_args!r}')
    return decorate


def _check_dims(dims: Any) -> None:
    if dims is None:
        return
    rules = [
        (dimension, rule)
        for of_parameter in (dims.values() if isinstance(dims, Mapping) else [None])
        for dimension, rule in (
            of_parameter.items() if isinstance(of_parameter, Mapping) else [(None, None)]
        )
    ]
    if not all(type(dimension) is int and isinstance(rule, Bucket) for dimension, rule in rules):
        raise TypeError(f"dims must be {{parameter: {{dimension: rule}}}}, got {dims!r}")


def _parameters(
    function: Callable[..., Any],
    dims: Mapping[str, Mapping[int, Bucket]],
    ignored: set[str],
    mutated: set[str] | None,
) -> list[Parameter]:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            name = getattr(function, "__qualname__", function)
            raise TypeError(f"{name}: *args and **kwargs cannot be tuned")
        found.append(
            Parameter(
                parameter.name,
                parameter.default,
                parameter.name in ignored,
                mutated is None or parameter.name in mutated,
                dict(dims.get(parameter.name, {})),
            )
        )
    return found
