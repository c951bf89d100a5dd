"""Quantize-and-pack into the page pool."""

from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages, value_records, write_records

__all__ = ["store_key_pages", "store_value_pages", "value_records", "write_records"]
