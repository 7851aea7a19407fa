"""embedserve: text in, vectors out, as fast as the machine can.

Importing this package imports nothing heavy: the client installs without torch.
"""

__version__ = "0.1.0"
