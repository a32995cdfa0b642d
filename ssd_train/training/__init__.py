"""Heads in training: cached samples go in, trained heads and validation figures come out."""
