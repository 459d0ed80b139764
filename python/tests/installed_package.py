"""Run by tools/test_python.sh against an installed wheel: the package is complete, typed, and computes."""

import subprocess
import sys
from pathlib import Path

import torch

import flce
from flce import _command

site = Path(sys.argv[1])
package = Path(flce.__file__).parent
assert package == site / "flce", package
assert (package / "py.typed").exists()
assert list((package / "lib").glob("libflce.so*"))
assert Path(_command.path()) == package / "bin" / "flce"
version = subprocess.run([sys.executable, "-m", "flce", "--version"], capture_output=True, text=True, check=True).stdout.strip()
assert version == flce.__version__, version
assert "torch" in flce.bench.NAMES
usage = subprocess.run([site / "bin" / "flce-shard-checkpoint", "--help"], capture_output=True, text=True, check=True).stdout
assert "--stages" in usage, usage
hidden, weight = torch.randn(12, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
labels = torch.randint(0, 50, (12,))
loss = flce.linear_cross_entropy(hidden, weight, labels, shift=1)
loss.backward()
expected = torch.nn.functional.cross_entropy((hidden @ weight.T)[:-1], labels[1:])
torch.testing.assert_close(loss, expected)
print(f"{package}: loss {loss.item():.6f}")
