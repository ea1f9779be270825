"""The Triton kernels. Importing a module of this package imports Triton.

Each module has one function per op of the same name in `autopar.kernels`, which takes the op's
arguments and launches. Sums and transcendentals are computed in float32 (float64 for float64
operands), results are rounded once, when they are written.
"""
