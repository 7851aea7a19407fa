"""Which architectures are served, by the name in a folder's config.json.

Knows names; torch comes in only when one is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embedserve.model.encoder import BertEncoder

SUPPORTED_ARCHITECTURES = ("BertModel",)


def encoder_class(architecture: str) -> type[BertEncoder]:
    """The class that reads this architecture's config, names its tensors and runs it."""
    assert architecture in SUPPORTED_ARCHITECTURES, architecture
    from embedserve.model.encoder import BertEncoder

    return BertEncoder
