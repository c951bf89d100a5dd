"""Qwen3 (and Qwen2) and LLaMA3 decoders, their configurations, names and placement. Import as ``kitty_jax.models``."""

if __name__ == "models":
    raise ImportError("this package is not importable as `models`; write `import kitty_jax.models` instead")
