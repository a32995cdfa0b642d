"""Trains and validates drafting heads for Spatially Speculative Decoding."""

__version__ = "0.1.0"
