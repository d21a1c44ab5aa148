"""Stands where Mooncake's package is not installed."""
