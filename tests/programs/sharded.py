"""Shard a model over a two-dimensional device mesh, train it, save it by torch.distributed.checkpoint and load it."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

folder = sys.argv[1]
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, size // 2) if size > 2 else (1, 2), mesh_dim_names=("replicate", "shard"))


def sharded(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    return fully_shard(model, mesh=mesh)


model = sharded(0)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
other = sharded(1)
state = {"model": get_model_state_dict(other)}
dcp.load(state, checkpoint_id=folder)
set_model_state_dict(other, state["model"])
same = torch.equal(model(torch.ones(1, 8)), other(torch.ones(1, 8)))
print(f"rank {rank}/{size} in mesh {tuple(mesh.mesh.shape)}: {'same' if same else 'different'}\n", end="", flush=True)
