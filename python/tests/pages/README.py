# instead of 151936 -> 1009
# instead of 1024 -> 16
import torch

head = torch.nn.Linear(32, 1009, bias=False, device=device)
hidden = torch.randn(2, 16, 32, device=device, requires_grad=True)
labels = torch.randint(0, 1009, (2, 16), device=device)
