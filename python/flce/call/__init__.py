"""A call: options, checks, operators and the autograd node."""
