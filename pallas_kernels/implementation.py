"""Choosing between a Mosaic GPU kernel and its reference."""

from __future__ import annotations

import functools
from typing import Literal

import jax

Implementation = Literal["auto", "mosaic", "xla"]
IMPLEMENTATIONS: tuple[str, ...] = ("auto", "mosaic", "xla")


@functools.cache
def device_unsupported() -> str | None:
    """Why the default device cannot run the Mosaic kernels, or None. Bulk copies and mbarriers need Hopper or newer."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the default device is {device.platform}, not an NVIDIA GPU"
    capability = getattr(device, "compute_capability", "0.0")
    if float(capability) < 9.0:
        return f"compute capability {capability} of {device.device_kind} is below 9.0 (Hopper)"
    return None


def choose(implementation: str, unsupported: str | None) -> Literal["mosaic", "xla"]:
    """The implementation to run.

    Args:
        implementation: "xla" is the reference; "mosaic" the kernel, or an error; "auto" the kernel where it can run.
        unsupported: why the kernel does not take these arguments, or None.

    Raises:
        ValueError: unknown name, or "mosaic" where the kernel cannot run, with the reason.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation == "xla":
        return "xla"
    reason = unsupported or device_unsupported()
    if implementation == "mosaic" and reason:
        raise ValueError(f"implementation='mosaic' cannot run: {reason}; use 'auto' or 'xla'")
    return "xla" if reason else "mosaic"
