"""Models: reading a folder, the packed forward, pooling. Knows tensors and rows, never requests or sockets.

Importing this package imports nothing heavy.
"""
