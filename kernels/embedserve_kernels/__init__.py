"""The operations of a forward pass, one a file: its kernels, and the wrapper that checks and chooses.

Importing this package imports nothing; it knows neither requests nor sockets.
"""
