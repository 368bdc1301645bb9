"""Pytree arithmetic, products, noise by counters, devices, validation: none of the paper's mathematics."""
