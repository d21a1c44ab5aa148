"""Checks and measurements on a GPU: kernels, which need no SGLang, and servers. All run on a CPU too, tiny."""
