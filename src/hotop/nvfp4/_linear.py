"""``NVFP4Linear``: a linear layer on the two ops; making one of ``nn.Linear``, and calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hotop.nvfp4._ops import nvfp4_gemm, tunable_fp4_quantize

# The largest magnitude that a block can hold: e4m3's times e2m1's.
_LARGEST = 448.0 * 6.0

Predicate = Callable[[str, nn.Linear], bool]


def global_scale(amax: Tensor | float) -> Tensor:
    """Return the global scale ``448*6 / amax``, float32 ``[]``; 1 where amax is 0."""
    amax = torch.as_tensor(amax, dtype=torch.float32)
    if amax.numel() != 1 or not bool(torch.isfinite(amax)) or bool(amax < 0):
        raise ValueError(f"amax must be one finite number that is not negative, got {amax}")
    amax = amax.reshape(())
    return torch.where(amax > 0, _LARGEST / amax, torch.ones_like(amax))


class NVFP4Linear(nn.Module):
    """``y = x @ weight.T + bias`` with weight and activation in NVFP4.

    Attributes:
        weight: uint8 ``[out_features, in_features/2]``.
        weight_scale: uint8, swizzled, 1-D: e4m3 bits, one per 16 weights.
        input_scale: float32 ``[]``: the activation's global scale.
        alpha: float32 ``[]``: ``1 / (input_scale * the weight's global scale)``.
        bias: ``[out_features]``, or None.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    alpha: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        input_scale: Tensor,
        alpha: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.in_features = 2 * weight.shape[1]
        self.out_features = weight.shape[0]
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("alpha", alpha)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, input_scale: Tensor | float | None = None
    ) -> NVFP4Linear:
        """Quantize a linear layer's weight; its global scale comes from its largest magnitude.

        Args:
            linear: float32, bfloat16 or float16, ``in_features`` a multiple of 16.
            input_scale: The activation's global scale, see :func:`global_scale` and
                :func:`record_amax`. None: 1, which loses precision in blocks whose largest
                magnitude is below 0.1 and saturates above 2688.

        Raises:
            ValueError: ``in_features`` is not a multiple of 16, or a scale is not positive.
        """
        if linear.in_features % 16 != 0:
            raise ValueError(
                f"in_features must be a multiple of 16 for NVFP4, got {linear.in_features}"
            )
        weight = linear.weight.detach()
        weight_global = global_scale(weight.abs().amax().float() if weight.numel() else 0.0)
        weight_global = weight_global.to(weight.device)
        scale = torch.as_tensor(
            1.0 if input_scale is None else input_scale, dtype=torch.float32
        ).to(weight.device)
        if scale.numel() != 1 or not bool(torch.isfinite(scale)) or not bool(scale > 0):
            raise ValueError(f"input_scale must be one positive number, got {input_scale}")
        scale = scale.detach().reshape(()).clone()
        packed, weight_scale = tunable_fp4_quantize(weight, weight_global, 16, True)
        return cls(packed, weight_scale, scale, 1.0 / (scale * weight_global), linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` of ``x``'s dtype for ``x`` ``[..., in_features]``."""
        act, act_sf = tunable_fp4_quantize(x, self.input_scale, 16, True)
        y = nvfp4_gemm(act, self.weight, act_sf, self.weight_scale, self.alpha, x.dtype)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


def _every_possible(name: str, linear: nn.Linear) -> bool:
    return linear.in_features % 16 == 0


def _selected(model: nn.Module, predicate: Predicate | None) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and (predicate or _every_possible)(name, module):
            yield name, module


@contextmanager
def record_amax(model: nn.Module, predicate: Predicate | None = None) -> Iterator[dict[str, float]]:
    """Record the largest magnitude of each linear layer's input while calibration data runs.

    Args:
        model: Its ``nn.Linear`` are watched.
        predicate: From name and layer: whether to watch it; None: all that NVFP4 can hold.

    Yields:
        The largest magnitude so far, by the layer's name. For :func:`convert`.
    """
    amax: dict[str, float] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args[0].numel():
                amax[name] = max(amax.get(name, 0.0), float(args[0].detach().abs().amax()))

        return hook

    handles = [
        linear.register_forward_pre_hook(watch(name))
        for name, linear in _selected(model, predicate)
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
) -> list[str]:
    """Replace linear layers of a model by :class:`NVFP4Linear`, in place.

    Args:
        model: Its ``nn.Linear`` (below it; the model itself is not replaced).
        predicate: From name and layer: whether to replace it; None: all that NVFP4 can hold.
        amax: Largest input magnitudes by name, of :func:`record_amax`; layers without one get
            the input scale 1.

    Returns:
        The names of the layers that were replaced.

    Raises:
        ValueError: A chosen layer's ``in_features`` is not a multiple of 16.
    """
    replaced = []
    for name, linear in _selected(model, predicate):
        if not name:
            continue
        found = (amax or {}).get(name)
        try:
            new = NVFP4Linear.from_linear(linear, None if found is None else global_scale(found))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        parent, _, own = name.rpartition(".")
        new.train(linear.training)
        setattr(model.get_submodule(parent), own, new)
        replaced.append(name)
    return replaced
