"""embed_tokens against numpy in float64."""

import numpy as np
import pytest
import torch

from embedserve_kernels.embed_tokens import embed_tokens


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_word_and_position_are_added_and_normalised(id_dtype, dtype, tolerance):
    random = np.random.default_rng(4)
    words = torch.from_numpy(random.standard_normal((50, 16), dtype=np.float32)).to(dtype)
    places, (weight, bias) = (random.standard_normal((rows, 16), dtype=np.float32) for rows in (9, 2))
    ids = random.integers(0, 50, 12).astype(id_dtype)
    positions = np.array([0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6, 8])
    result = embed_tokens(
        *map(torch.from_numpy, (ids, positions)), words, *map(torch.tensor, (places, weight, bias)), 1e-6
    )
    total = words.double().numpy()[ids] + places[positions]
    centred = total - total.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-6) * weight + bias
    assert result.dtype == dtype
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=tolerance, atol=tolerance)
