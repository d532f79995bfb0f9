import argparse
import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from data import batches  # yields (input_ids, labels) for this rank

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--config", required=True)
args = parser.parse_args()
cfg = json.load(open(args.config))

model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16).cuda()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=cfg["learning_rate"])
for step, (x, y) in enumerate(batches(cfg, dist.get_rank(), dist.get_world_size())):
    loss = model(input_ids=x.cuda(), labels=y.cuda()).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    if (step + 1) % cfg["save_every"] == 0:
        from torch.distributed.checkpoint import save
        save({"model": model.state_dict()}, checkpoint_id=f"{cfg['out']}/{step}")
