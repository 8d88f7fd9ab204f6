"""The kylin backend: GGUF weights and the forward pass in NumPy and numba. It knows arrays, never requests."""
