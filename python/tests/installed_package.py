"""Run by tools/test_python.sh against an installed wheel: the package is complete, typed, and computes."""

import sys
from pathlib import Path

import torch

import flce

site = Path(sys.argv[1])
package = Path(flce.__file__).parent
assert package == site / "flce", package
assert (package / "py.typed").exists()
assert (package / "lib" / "libflce.so").exists()
hidden, weight = torch.randn(12, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
labels = torch.randint(0, 50, (12,))
loss = flce.linear_cross_entropy(hidden, weight, labels, shift=1)
loss.backward()
expected = torch.nn.functional.cross_entropy((hidden @ weight.T)[:-1], labels[1:])
torch.testing.assert_close(loss, expected)
print(f"{package}: loss {loss.item():.6f}")
