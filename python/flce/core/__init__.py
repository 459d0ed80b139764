"""Library, frames, kernels and memory under torch."""
