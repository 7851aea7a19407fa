"""x @ weight.T, and a bias where there is one, over packed tokens, with the activation fused where the machine can.

Knows one matrix at a time: neither the model it belongs to nor the sequences in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812

Activation = Literal["none", "gelu", "gelu_tanh"]

# _linear_pointwise's names: the operation fused behind the product, and its algorithm
_ONEDNN_ACTIVATIONS = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}
_REORDER_FOR_TOKENS = 2048  # the layout chosen for this many tokens is also the fastest measured for 12


@dataclass(frozen=True)
class LinearWeight:
    """A matrix as `linear` wants it. Where `reordered`, `weight` is opaque: oneDNN's own blocked layout."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    reordered: bool


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
    """Once at load. weight [out, in] and bias [out], of one dtype and on the device they will be used on.

    On a CPU the weight is reordered for oneDNN here, because a plain linear does it again at every call.
    """
    assert weight.dim() == 2, weight.shape
    if bias is not None:
        assert bias.shape == weight.shape[:1], (bias.shape, weight.shape)
        assert bias.dtype == weight.dtype, (bias.dtype, weight.dtype)
    if not _onednn_takes(weight):
        return LinearWeight(weight.contiguous(), bias, reordered=False)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _REORDER_FOR_TOKENS)
    return LinearWeight(reordered, bias, reordered=True)


def linear(x: torch.Tensor, weight: LinearWeight, activation: Activation = "none") -> torch.Tensor:
    """[total_tokens, in] -> [total_tokens, out] in x's dtype; `gelu` is the exact (erf) one."""
    assert x.dtype == weight.weight.dtype, (x.dtype, weight.weight.dtype)
    if not weight.reordered:
        return linear_reference(x, weight.weight, weight.bias, activation)
    attribute, algorithm = _ONEDNN_ACTIVATIONS[activation]
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.weight, weight.bias, attribute, [], algorithm)
    return y


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation = "none"
) -> torch.Tensor:
    """The same on any device, from a plain weight [out, in]."""
    y = F.linear(x, weight, bias)
    if activation == "none":
        return y
    return F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")


def _onednn_takes(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
