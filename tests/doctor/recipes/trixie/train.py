"""Stands for a training script that torch.distributed.launch gives its local rank."""
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
print(f"rank with the local rank {parser.parse_known_args()[0].local_rank}", flush=True)
