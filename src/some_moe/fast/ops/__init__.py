"""Triton kernels and the operations made of them."""
