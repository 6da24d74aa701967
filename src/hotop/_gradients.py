"""What the backward of a recorded call needs rarely: odd lists, wrong counts, their errors."""

from __future__ import annotations

from typing import Any

from torch._library.autograd import not_list_of_optional_tensor
from torch.utils import _pytree

from hotop._versions import COUNTS_GRADIENTS


class Structure(tuple[tuple[int, ...], tuple[int, ...]]):
    """How the lists of a call were taken apart: of its inputs, of its outputs.

    One number per input or output: the length of a list of Tensors, -1 for any other value. Stands
    in ``ctx._pt_metadata`` and answers what PyTorch's own backward asks there.
    """

    __slots__ = ()

    @property
    def input_spec(self) -> _pytree.TreeSpec:
        """Return the tree of the inputs, with the one that PyTorch's layer adds."""
        return _pytree.tree_structure((*_example(self[0]), None))

    @property
    def output_spec(self) -> _pytree.TreeSpec:
        """Return the tree of the outputs."""
        return _pytree.tree_structure(tuple(_example(self[1])))


def _example(counts: tuple[int, ...]) -> list[Any]:
    return [None if count < 0 else [None] * count for count in counts]


def _printed(name: str) -> str:
    """Return the dispatcher's name of an overload as PyTorch prints the overload."""
    namespace, _, rest = name.partition("::")
    return f"{namespace}.{rest}" if "." in rest else f"{namespace}.{rest}.default"


def check_count(name: str, inputs: int, positional: int, result: Any) -> Any:
    """Return what the engine shall see of a formula's result that has an unusual length.

    ``inputs`` are those that the call gave, ``positional`` those that the schema declares.
    """
    if not COUNTS_GRADIENTS:
        return result  # the engine counts, and says so
    name = _printed(name)
    returned = len(result) if isinstance(result, tuple) else 1
    if returned not in (inputs, positional):
        expected = str(inputs) if inputs == positional else f"{inputs} or {positional}"
        raise RuntimeError(
            f"The backward formula for {name} returned an incorrect number of gradients "
            f"(expected {expected}, got {returned}). Expected one gradient for each forward input, "
            "or for each positional input to the operator. Use None for inputs that do not "
            "require a gradient."
        )
    surplus = result[inputs:] if isinstance(result, tuple) else ()
    if any(grad is not None for grad in surplus):
        raise RuntimeError(
            f"The backward formula for {name} returned a non-None gradient for an input that was "
            "not passed to the operator. Defaulted inputs that were not passed through autograd "
            "must return None."
        )
    return result[:inputs] if isinstance(result, tuple) else result


def flatten(name: str, structure: Structure, positional: int, result: Any) -> tuple[Any, ...]:
    """Return the gradients of a formula with list inputs one by one, or raise PyTorch's error."""
    result = check_count(name, len(structure[0]), positional, result)
    grads = result if isinstance(result, tuple) else (result,)
    flat, spec = _pytree.tree_flatten((*grads, None), not_list_of_optional_tensor)
    if spec != structure.input_spec:
        raise RuntimeError(
            "Expected the return from backward to be of the same structure as the inputs. "
            f"Got: {spec} (return from backward), {structure.input_spec} (inputs)"
        )
    return tuple(flat[:-1])
