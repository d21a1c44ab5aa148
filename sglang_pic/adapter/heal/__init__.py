"""Approximate rows are computed again in their own slots: beside the answer, and while nobody waits."""
