"""Measurements and checks of the live model before the first request."""
