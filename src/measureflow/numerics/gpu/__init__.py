"""Sums over pairs as kernels for NVIDIA's GPUs, in Pallas for Mosaic, which knows Hopper and later ones.

`pair_sums` imports them where there is such a GPU, and only there: not every machine can.
"""
