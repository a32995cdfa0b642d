"""Frozen autoregressive image models behind one contract: one family a file."""
