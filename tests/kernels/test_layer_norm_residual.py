"""layer_norm_residual against float64."""

import pytest
import torch

from embedserve_kernels.layer_norm_residual import layer_norm_residual


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("shape", [(1, 8), (3, 48), (65, 384)], ids=str)
def test_sum_has_mean_and_variance_of_the_layer(shape, dtype, tolerance):
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight, bias = torch.randn(2, shape[1], generator=generator)
    total = (x + residual).double()  # the sum is rounded to the dtype, as any residual stream's is
    centred = total - total.mean(dim=1, keepdim=True)
    expected = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-12).sqrt() * weight + bias
    result = layer_norm_residual(x, residual, weight, bias, 1e-12)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
