"""Run by tools/test_python.sh and tests/ways against an installed package, with its folder and that of its commands: the package is
complete and typed, and trains."""

import subprocess
import sys
from pathlib import Path

import torch

import flce
from flce import _command

site, commands = Path(sys.argv[1]), Path(sys.argv[2])
package = Path(flce.__file__).parent
assert package == site / "flce", package
assert (package / "py.typed").exists()
assert list((package / "lib").glob("libflce.so*"))
assert Path(_command.path()) == package / "bin" / "flce"
version = subprocess.run([sys.executable, "-m", "flce", "--version"], capture_output=True, text=True, check=True).stdout.strip()
assert version == flce.__version__, version
assert "torch" in flce.bench.NAMES
usage = subprocess.run([commands / "flce-shard-checkpoint", "--help"], capture_output=True, text=True, check=True).stdout
assert "--stages" in usage, usage
hidden, weight = torch.randn(1, 12, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
labels = torch.randint(0, 50, (1, 12))
loss = flce.linear_cross_entropy(hidden, weight, labels, shift=1)
loss.backward()
expected = torch.nn.functional.cross_entropy((hidden @ weight.T)[0, :-1], labels[0, 1:])
torch.testing.assert_close(loss, expected)

head = torch.nn.Linear(16, 50, bias=False)
optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    step = flce.linear_cross_entropy(hidden.detach(), head.weight, labels)
    step.backward()
    optimizer.step()
    losses.append(step.item())
assert losses[2] < losses[1] < losses[0], losses
print(f"{package}: loss {loss.item():.6f}, trained from {losses[0]:.4f} to {losses[2]:.4f}")
