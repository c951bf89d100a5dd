"""Attention of new tokens over a quantized layer."""
