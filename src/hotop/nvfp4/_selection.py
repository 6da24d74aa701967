"""Which linear layers of a model can be replaced, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from hotop.nvfp4._held import held_in
from hotop.nvfp4._linear import BUFFER_DTYPES, weight_problem
from hotop.nvfp4._weight_reads import (
    Path,
    has_own_functions,
    reads,
    reads_unknown,
    weights_read,
)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class Found:
    """A linear layer of a model, once however many names it has.

    Attributes:
        linear: The layer.
        names: Its names in the model.
        slots: Where it is registered: each parent, and its name there.
        not_like_linear: Why it does not do what an ``nn.Linear`` does, or is not used as one.
        not_replaceable: Why it cannot be replaced although it is one.
    """

    linear: nn.Linear
    names: list[str] = field(default_factory=list)
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    not_like_linear: str | None = None
    not_replaceable: str | None = None


def find_linears(model: nn.Module) -> list[Found]:
    """Return the linear layers below a model, in the order of its modules."""
    found: dict[int, Found] = {}
    weight_reads: dict[int, set[Path]] = {}
    for ancestors, names in _walk(model, [], [], set()):
        linear = ancestors.pop()
        assert isinstance(linear, nn.Linear)
        entry = found.setdefault(id(linear), Found(linear))
        entry.names.append(".".join(names))
        entry.slots.append((ancestors[-1], names[-1]))
        if entry.not_like_linear is None:
            entry.not_like_linear = _not_like_linear(linear) or _other_use(
                ancestors, names, weight_reads
            )
    owners, aside = _Owners(model), _held_aside(model)
    for entry in found.values():
        if entry.not_like_linear is None:
            entry.not_replaceable = (
                _not_replaceable(entry.linear)
                or owners.sharing(entry.linear)
                or aside.get(id(entry.linear))
            )
    return list(found.values())


def _walk(
    module: nn.Module, ancestors: list[nn.Module], names: list[str], seen: set[int]
) -> Iterator[tuple[list[nn.Module], list[str]]]:
    """Every place of a linear layer: the modules that lead to it, itself the last, and names."""
    seen.add(id(module))
    for name, child in module._modules.items():
        if child is None:
            continue
        if isinstance(child, nn.Linear):
            yield [*ancestors, module, child], [*names, name]
        if id(child) not in seen:
            yield from _walk(child, [*ancestors, module], [*names, name], seen)


def _not_like_linear(linear: nn.Linear) -> str | None:
    own_class = type(linear)
    if nn.utils.parametrize.is_parametrized(linear):
        return f"it is parametrized: {', '.join(linear.parametrizations)}"  # type: ignore[arg-type]
    if own_class is not nn.Linear:
        return f"{own_class.__module__}.{own_class.__qualname__} is a subclass of nn.Linear"
    if "forward" in vars(linear):
        return "it has a forward of its own"
    if linear._compiled_call_impl is not None:
        return "it is compiled by its method compile"
    taken = sorted(vars(linear).keys() & (BUFFER_DTYPES.keys() - {"weight"}))
    if taken:
        return f"its attribute {taken[0]} has the name of one of NVFP4Linear's buffers"
    others = [
        *(name for name in linear._parameters if name not in ("weight", "bias")),
        *linear._buffers,
        *linear._modules,
    ]
    if others or not isinstance(linear._parameters.get("weight"), Tensor):
        return (
            f"it holds {', '.join(others) or 'no weight'}, as weight_norm, spectral_norm and "
            "pruning leave it"
        )
    return None


def _other_use(
    ancestors: list[nn.Module], names: list[str], weight_reads: dict[int, set[Path]]
) -> str | None:
    if names[-1] == "_orig_mod":
        return "torch.compile holds it: convert before"
    for depth, ancestor in enumerate(ancestors):
        kind = id(ancestor if has_own_functions(ancestor) else type(ancestor))
        if kind not in weight_reads:
            weight_reads[kind] = weights_read(ancestor)
        if reads(weight_reads[kind], tuple(names[depth:])):
            return f"{type(ancestor).__qualname__} reads its weight instead of calling it"
        inside = ancestors[depth + 1 :]
        if reads_unknown(weight_reads[kind]) and all(isinstance(m, _CONTAINERS) for m in inside):
            return f"{type(ancestor).__qualname__} reads a weight that may be this one"
    return None


def _not_replaceable(linear: nn.Linear) -> str | None:
    for name in ("weight", "bias"):
        held = linear._parameters.get(name)
        if held is not None and type(held) is not nn.Parameter:
            return f"its {name} is a {type(held).__qualname__}"
    if any(getattr(hook, "with_module", False) for hook in _load_hooks(linear)):
        return "its load_state_dict pre-hooks hold the layer itself"
    return weight_problem(linear)


def _load_hooks(linear: nn.Linear) -> list[object]:
    return list(linear._load_state_dict_pre_hooks.values())


def _held_aside(model: nn.Module) -> dict[int, str]:
    """Where layers stand beside the modules' own tables, by layer: there the old one would stay."""
    found = {}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # Not by attribute: that computes a parametrization, and there may be none.
    by_weight = {id(linear._parameters.get("weight")): linear for linear in linears}
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            for item in held_in(value):
                layer = item if isinstance(item, nn.Linear) else by_weight.get(id(item))
                if layer is not None:
                    found[id(layer)] = f"{type(module).__qualname__} holds it in {name} too"
    return found


class _Owners:
    """The tensors of a model by storage, each with the module that holds it and a name."""

    def __init__(self, model: nn.Module) -> None:
        self._of_storage: dict[int, list[tuple[nn.Module, str, Tensor]]] = {}
        for module_name, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                key = None if tensor is None else _storage(tensor)
                if key is not None and tensor is not None:
                    full_name = f"{module_name}.{name}" if module_name else name
                    self._of_storage.setdefault(key, []).append((module, full_name, tensor))

    def sharing(self, linear: nn.Linear) -> str | None:
        """Say with which tensor of the model a layer's weight shares memory."""
        weight = linear.weight
        key = _storage(weight)
        for module, name, other in [] if key is None else self._of_storage[key]:
            if other is weight and module is linear:
                continue
            if other is weight or _overlap(weight, other):
                return f"its weight is shared with {name}"
        return None


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):
        return None  # sparse, not initialized yet, a subclass without memory of its own


def _overlap(first: Tensor, second: Tensor) -> bool:
    (start, end), (other_start, other_end) = _extent(first), _extent(second)
    return start < other_end and other_start < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (int(last) + 1) * tensor.element_size()
