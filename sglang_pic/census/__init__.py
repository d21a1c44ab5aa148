"""Counts, without a model or GPU, which tokens of recorded calls a prefix cache serves and which this one adds."""
