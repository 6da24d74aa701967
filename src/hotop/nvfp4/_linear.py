"""``NVFP4Linear``: a linear layer on the two ops, with a gradient for its input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from hotop.nvfp4._checks import BLOCK, FLOATS
from hotop.nvfp4._ops import nvfp4_dequantize, nvfp4_gemm, tunable_fp4_quantize

# The largest magnitude that a block can hold: e4m3's times e2m1's.
_LARGEST = 448.0 * 6.0
# A block's multiplier is 1 / (sf / global scale), and sf is at least 2^-9: with a larger global
# scale it can be infinite, which makes the block's zeros NaN.
_MOST_SCALE = 2.0**118
# Below any global scale of a finite float32 tensor, 2688 / 3.4e38.
_LEAST_SCALE = 2.0**-117
_LEAST_NORMAL = 2.0**-126
# The buffers' dtypes, in a checkpoint and through every conversion of a model.
BUFFER_DTYPES = {
    "weight": torch.uint8,
    "weight_scale": torch.uint8,
    "input_scale": torch.float32,
    "alpha": torch.float32,
}

_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
_are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def global_scale(amax: Tensor | float) -> Tensor:
    """Return the global scale ``448*6 / amax``, float32 ``[]``, at most ``2**118``; 1 for amax 0.

    A larger one could not be used: the multiplier of a block with small values would be infinite.

    Raises:
        ValueError: ``amax`` is not one finite number that is not negative.
    """
    amax = _float32(amax)
    if amax.numel() != 1 or (_has_values(amax) and not 0.0 <= float(amax) < math.inf):
        raise ValueError(f"amax must be one finite number that is not negative, got {amax}")
    amax = amax.reshape(())
    # A number over a Tensor would be computed by the reciprocal.
    scale = (torch.full_like(amax, _LARGEST) / amax).clamp(max=_MOST_SCALE)
    return torch.where(amax > 0, scale, torch.ones_like(amax))


def _linear(
    input: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor, alpha: Tensor
) -> Tensor:
    act, act_sf = tunable_fp4_quantize(input, input_scale, BLOCK, True)
    result: Tensor = nvfp4_gemm(act, weight, act_sf, weight_scale, alpha, input.dtype)
    return result


class _Recorded(torch.autograd.Function):
    """The two ops for autograd and ``torch.func``: between them stand integers.

    Without a ``jvp``, which Dynamo does not trace: autograd then refuses forward mode.
    """

    @staticmethod
    def forward(
        input: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor, alpha: Tensor
    ) -> Tensor:
        return _linear(input, input_scale, weight, weight_scale, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if any(ctx.needs_input_grad[1:]):
            raise NotImplementedError("NVFP4Linear has gradients for its input and bias alone")
        ctx.dtype = output.dtype
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input_scale, weight, weight_scale, alpha = ctx.saved_tensors
        scale = 1.0 / (alpha * input_scale)
        values = nvfp4_dequantize(weight, weight_scale, scale, ctx.dtype, True)
        return grad @ values, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], input: Tensor, *held: Tensor) -> Any:
        if any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError("vmap over an NVFP4Linear's own tensors is not supported")
        return _Recorded.apply(input.movedim(in_dims[0] or 0, 0), *held), 0


@torch.fx.wrap  # one call in a symbolic trace, whose values cannot be asked
def _product(
    input: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor, alpha: Tensor
) -> Tensor:
    """The layer without its bias."""
    if _is_any_autocast_enabled():
        input = _autocast(input)
    try:
        if (
            (input.requires_grad and torch.is_grad_enabled())
            or _are_transforms_active()
            or forward_ad._current_level >= 0
        ):
            y: Tensor = _Recorded.apply(input, input_scale, weight, weight_scale, alpha)
            return y
        return _linear(input, input_scale, weight, weight_scale, alpha)
    except Exception as error:
        _explain(input, weight, error)
        raise


def _explain(input: Tensor, weight: Tensor, error: Exception) -> None:
    """Raise what was wrong with a layer's input, where the ops have other words for it."""
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a Tensor, got {type(input).__name__}") from None
    if input.is_nested:
        raise TypeError("NVFP4Linear does not take nested Tensors") from None
    if input.layout is not torch.strided:
        raise TypeError(f"NVFP4Linear takes strided Tensors, got {input.layout}") from None
    if "implement the jvp function" in str(error):
        raise RuntimeError(
            "NVFP4Linear has no derivative for forward mode (jvp); reverse mode has one"
        ) from None
    in_features = 2 * weight.shape[-1]
    if input.shape[-1:] != (in_features,) and weight.dtype == torch.uint8:
        raise RuntimeError(
            f"the last dimension of input must be in_features, {in_features}, got a Tensor of "
            f"size {list(input.shape)}"
        ) from None


class NVFP4Linear(nn.Module):
    """``y = x @ weight.T + bias`` with weight and activation in NVFP4.

    Called as ``nn.Linear`` is. The result has the input's dtype, whatever the bias has; under
    autocast, autocast's. The gradient for the input is ``grad @ weight`` with the weight as NVFP4
    holds it, as if the activation had not been rounded (straight through); the bias has its own
    where it requires one; the weight has none.

    ``.to(torch.bfloat16)``, ``.half()`` and so on convert the bias and leave the buffers' dtypes.

    Attributes:
        weight: uint8 ``[out_features, in_features/2]``.
        weight_scale: uint8, swizzled, 1-D: e4m3 bits, one per 16 weights.
        input_scale: float32 ``[]``: the activation's global scale.
        alpha: float32 ``[]``: ``1 / (input_scale * the weight's global scale)``.
        bias: ``[out_features]``, or None.
    """

    in_features: int
    out_features: int
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
        """Take over the buffers as they are; a bias that is no Parameter becomes a frozen one."""
        super().__init__()
        self.in_features = 2 * weight.shape[1]
        self.out_features = weight.shape[0]
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("alpha", alpha)
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, input_scale: Tensor | float | None = None
    ) -> NVFP4Linear:
        """Quantize a linear layer's weight; its global scale comes from its largest magnitude.

        Args:
            linear: float32, bfloat16 or float16, ``in_features`` a multiple of 16. The bias shares
                its memory. On ``meta`` the new layer is there too.
            input_scale: The activation's global scale, see :func:`global_scale` and
                :func:`record_amax`. None: 1, which loses precision in blocks whose largest
                magnitude is below 0.1 and saturates above 2688.

        Raises:
            TypeError: ``linear`` is no ``nn.Linear``.
            ValueError: NVFP4 cannot hold the weight: dtype, layout, ``in_features``, values that
                are not finite; ``input_scale`` is not one positive number from ``2**-117`` to
                ``2**118``, or ``alpha`` with it is beyond float32.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
        problem = weight_problem(linear)
        if problem is not None:
            raise ValueError(problem)
        # Buffers made in inference mode could not be saved for a backward pass later.
        with torch.inference_mode(False), torch.no_grad():
            weight = linear.weight.detach()
            scale = _input_scale(input_scale, weight.device)
            weight_global = _weight_scale(weight, scale)
            packed, weight_scale = tunable_fp4_quantize(weight, weight_global, BLOCK, True)
            alpha = (1.0 / (scale.double() * weight_global.double())).float()
            if _has_values(alpha) and not math.isfinite(float(alpha)):
                raise ValueError(
                    f"input_scale {float(scale):.3g} and the weight's global scale "
                    f"{float(weight_global):.3g} are too small together: alpha is beyond float32"
                )
            bias = linear.bias
            if bias is not None:
                # A Tensor of inference mode can require no gradient outside it.
                trains = bias.requires_grad and not bias.is_inference()
                bias = nn.Parameter(bias.detach(), requires_grad=trains)
            return cls(packed, weight_scale, scale, alpha, bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., out_features]`` of the input's dtype for ``[..., in_features]``.

        Raises:
            RuntimeError: The last dimension is not ``in_features``.
            TypeError: The input is not float32, bfloat16 or float16.
        """
        own: Any = self._buffers  # nn.Module's look-up of an attribute takes half a microsecond
        y: Tensor = _product(
            input, own["input_scale"], own["weight"], own["weight_scale"], own["alpha"]
        )
        bias = self.bias
        if bias is None:
            return y
        return y + (bias if bias.dtype is y.dtype else bias.to(y.dtype))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NVFP4Linear:
        own = {id(self._buffers.get(name)) for name in BUFFER_DTYPES}

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in own and moved.dtype != tensor.dtype:
                return tensor.to(moved.device)
            return moved

        return super()._apply(keep_dtype, recurse)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        wrong = [
            f"{prefix}{name} must be {dtype}, got {found.dtype}"
            for name, dtype in BUFFER_DTYPES.items()
            if isinstance(found := state_dict.get(prefix + name), Tensor) and found.dtype != dtype
        ]
        if wrong:
            error_msgs.append(
                f"{'; '.join(wrong)}: this is no checkpoint of an NVFP4Linear. Load that of an "
                "nn.Linear before the model is converted."
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def weight_problem(linear: nn.Linear) -> str | None:
    """Say why NVFP4 cannot hold a layer's weight; None if it can, as far as its kind shows."""
    if nn.parameter.is_lazy(linear.weight):
        return "the weight is not initialized yet"
    if linear.in_features % BLOCK != 0:
        return f"in_features must be a multiple of {BLOCK} for NVFP4, got {linear.in_features}"
    if linear.weight.dtype not in FLOATS:
        return f"the weight must be float32, bfloat16 or float16, got {linear.weight.dtype}"
    if linear.weight.layout != torch.strided:
        return f"the weight must be strided, got {linear.weight.layout}"
    return None


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or is_fake(tensor))


def _float32(number: Tensor | float, device: torch.device | None = None) -> Tensor:
    """A Tensor where it is, a number on ``device``."""
    if isinstance(number, Tensor):
        return number.detach().to(torch.float32)
    return torch.tensor(number, dtype=torch.float32, device=device)


def _input_scale(given: Tensor | float | None, device: torch.device) -> Tensor:
    scale = _float32(1.0 if given is None else given, device)
    if scale.numel() != 1 or (
        _has_values(scale) and not _LEAST_SCALE <= float(scale) <= _MOST_SCALE
    ):
        raise ValueError(
            f"input_scale must be one positive number from 2**-117 to 2**118, got {given}"
        )
    return scale.reshape(()).to(device, copy=True)


def _weight_scale(weight: Tensor, input_scale: Tensor) -> Tensor:
    """The weight's global scale; not so large that alpha would be subnormal."""
    amax = weight.abs().amax().float() if weight.numel() else input_scale.new_zeros(())
    if _has_values(amax) and not math.isfinite(float(amax)):
        raise ValueError("the weight has values that are not finite")
    return torch.minimum(global_scale(amax), 1.0 / (_LEAST_NORMAL * input_scale))


def _autocast(input: Tensor) -> Tensor:
    """What autocast does to the input of ``nn.Linear``."""
    device_type = input.device.type
    if not torch.amp.is_autocast_available(device_type):
        return input
    if not torch.is_autocast_enabled(device_type) or not input.is_floating_point():
        return input
    if input.dtype is torch.float64:
        return input
    return input.to(torch.get_autocast_dtype(device_type))
