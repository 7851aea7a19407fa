"""The frontend process: HTTP and gRPC on one event loop, one service behind both. No torch, no transformers."""
