"""embedserve: text in, vectors out, as fast as the machine can.

Importing this package imports nothing heavy: the client installs without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedserve.in_process import Engine

__all__ = ["Engine", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Engine`, which brings torch, only when it is asked for."""
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from embedserve.in_process import Engine
    except ModuleNotFoundError as error:
        message = f"embedserve.Engine needs the package {error.name}: pip install 'embedserve[server]'"
        raise ImportError(message, name=error.name) from error
    return Engine
