"""Operators of their own kernels, whose calls have structs of their own."""
