"""The operations of a forward pass, one a file: a reference, its kernels, and the wrapper that chooses.

Importing this package imports nothing; it knows neither requests nor sockets.
"""
