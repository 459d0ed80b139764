import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
group, rank, ranks, close = dist.group.WORLD, 0, 1, dist.destroy_process_group
mesh = init_device_mesh(device, (1,), mesh_dim_names=("tp",))
hidden, table = torch.randn(24, 16, device=device, requires_grad=True), torch.randn(64, 16, device=device)
labels, vocab_size = torch.randint(0, 60, (24,), device=device), 60
shard, head = table.clone().requires_grad_(), torch.nn.Linear(16, 64, bias=False, device=device)
padded_shard = shard
