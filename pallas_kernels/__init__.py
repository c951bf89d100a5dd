"""Packing, quantization and attention over quantized pages: array functions that know nothing of models."""

# The folder lies at the top of a checkout and inside the package as a symlink. Two copies of one module, under two
# names, would register every pytree twice, and `models` would shadow other people's folders: one name each.
if __name__ == "pallas_kernels":
    raise ImportError("import `kitty_jax.pallas_kernels` instead of `pallas_kernels`: the bare name is not a package")
