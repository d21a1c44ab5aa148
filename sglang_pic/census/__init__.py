"""Counts, without a model or a GPU, what a prefix cache serves of recorded calls and what this cache would add."""
