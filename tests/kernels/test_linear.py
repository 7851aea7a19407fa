"""linear against a float64 product, with and without oneDNN's reordered weight."""

import pytest
import torch

from embedserve_kernels.linear import linear, linear_reference, prepare_linear

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
ACTIVATIONS = {
    "none": lambda y: y,
    "gelu": lambda y: y * 0.5 * (1 + torch.erf(y / 2**0.5)),
    "gelu_tanh": lambda y: 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))),
}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 384, 1152), (7, 48, 100), (130, 100, 48)], ids=str)
def test_product_bias_and_activation(shape, activation, dtype):
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    expected = ACTIVATIONS[activation](x.double() @ weight.double().T + bias.double())
    for y in (linear(x, prepare_linear(weight, bias), activation), linear_reference(x, weight, bias, activation)):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
