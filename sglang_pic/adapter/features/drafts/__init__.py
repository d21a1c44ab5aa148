"""The draft models of speculative decoding."""
