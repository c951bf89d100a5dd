"""Inference with a cache: sampling, prompts, decode loop, scheduler, ``generate``, ``Engine``, memory plan."""
