"""Pins every source of chance, so that a test that fails once fails every time.
Knows hypothesis and the generators' seeds, and must not know what is tested.
"""

from __future__ import annotations

import random
import sys

import hypothesis
import numpy as np
import pytest

SEED = 20_250_101

hypothesis.settings.register_profile(
    "pinned",
    derandomize=True,
    database=None,
    deadline=None,  # a busy machine is not a failure
    print_blob=True,
)
hypothesis.settings.load_profile("pinned")


@pytest.fixture(autouse=True)
def pinned_seeds() -> None:
    """Each test starts from the same seeds, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)  # for libraries that draw from it
    if torch := sys.modules.get("torch"):  # only where a test's module has imported it
        torch.manual_seed(SEED)
