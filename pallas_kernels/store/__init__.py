"""Quantize-and-pack into the page pool."""
