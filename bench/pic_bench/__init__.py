"""Measures this project: comparisons, fidelity, benchmarks, and the settings that a model tolerates.

The code of a study that was run once is in the checkout that bench/results/README.md names, beside its records there.
"""
