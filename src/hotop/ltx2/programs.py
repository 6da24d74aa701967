"""One model that runs as any variant, eager or with compiled blocks, by an exchange of classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from torch import Tensor, nn

from hotop.ltx2.kernels import OP_NAMES, QUANTIZE, Kernels
from hotop.ltx2.linear import by_callables, linear_class, own_code
from hotop.ltx2.variants import Variant
from hotop.nvfp4 import NVFP4Linear, convert

GRAD_MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@dataclass(frozen=True)
class Program:
    """What makes the model run as one variant.

    Attributes:
        linear: The class of the converted linears.
        block: The class of the transformer blocks.
        enter: Called before a step, outside of the measured time.
        leave: Called after it.
    """

    linear: type[NVFP4Linear]
    block: type[nn.Module]
    enter: Callable[[], None] | None = None
    leave: Callable[[], None] | None = None


class Switchboard:
    """A converted model whose modules take the classes of the program that is to run.

    All variants run in the same objects with the same weights, so that none has a luckier place in
    memory. The classes are exchanged, not an attribute, so Dynamo's guards see a module as it was.
    """

    def __init__(self, model: Any) -> None:
        """Take over `model`, whose linears may still be converted."""
        self.model = model
        self.blocks: list[nn.Module] = list(model.transformer_blocks)
        self.converted: list[nn.Module] = []

    def convert(self, amax: Mapping[str, float]) -> None:
        """Convert every linear of the blocks; `amax` as `hotop.nvfp4.record_amax` finds it."""
        blocks = self.model.transformer_blocks
        convert(blocks, amax=amax)
        self.converted = [m for m in blocks.modules() if isinstance(m, NVFP4Linear)]

    def show(self, program: Program) -> None:
        """Make the model run as `program`."""
        for linear in self.converted:
            linear.__class__ = program.linear
        for block in self.blocks:
            block.__class__ = program.block


def eager_program(variant: Variant) -> Program:
    """The program of a variant without a compiler."""
    return Program(variant.linear, LTX2VideoTransformerBlock)


def compiled_program(variant: Variant) -> Program:
    """The program whose blocks are compiled, all by one `torch.compile` and so into one graph.

    `LTX2VideoTransformerBlock.forward` is compiled as it is, as `model.compile_repeated_blocks`
    would, but with a code object, and so a cache of graphs, for this program alone.
    """
    compiled = torch.compile(
        own_code(LTX2VideoTransformerBlock.forward), fullgraph=True, dynamic=False
    )

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return compiled(self, *args, **kwargs)

    block = type("CompiledBlock", (LTX2VideoTransformerBlock,), {"__call__": call})
    return Program(variant.linear, block)


def bare_program(compiled: Program, namespace: str, kernels: Kernels) -> Program:
    """A compiled program with the kernels themselves where its graph calls the ops.

    Inductor's code looks ``torch.ops.<namespace>.<op>.default`` up in every call, so the kernel can
    stand there: the same guards, the same code, and a call without any registration. That is
    the floor of what a registration can reach.
    """
    packets = {name: getattr(getattr(torch.ops, namespace), name) for name in OP_NAMES}
    overloads = {name: packet.default for name, packet in packets.items()}

    def enter() -> None:
        for name, packet in packets.items():
            packet.default = kernels[name]

    def leave() -> None:
        for name, packet in packets.items():
            packet.default = overloads[name]

    return Program(compiled.linear, compiled.block, enter, leave)


def recording_program(
    kernels: Kernels, calls: Counter[str], arguments: dict[str, list[tuple[Any, ...]]]
) -> Program:
    """An eager program of plain functions that counts the calls and keeps their arguments."""

    def recorded(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            arguments.setdefault(name, []).append(args)
            return kernels[name](*args)

        return call

    quantize, gemm = (recorded(name) for name in OP_NAMES)
    assert OP_NAMES[0] == QUANTIZE
    linear = linear_class("RecordingLinear", by_callables(quantize, gemm))
    return Program(linear, LTX2VideoTransformerBlock)


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    """Whether two pairs of Tensors are equal bit for bit, NaN included."""
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )
