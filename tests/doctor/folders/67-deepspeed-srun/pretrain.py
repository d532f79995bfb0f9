import argparse
import deepspeed, torch

p = argparse.ArgumentParser()
p.add_argument("--local_rank", type=int, default=-1)
deepspeed.add_config_arguments(p)
args = p.parse_args()

net = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
data = torch.utils.data.TensorDataset(torch.randn(65536, 1024))
engine, _, loader, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters(), training_data=data)
for (x,) in loader:
    x = x.to(engine.device, torch.bfloat16)
    loss = (engine(x) - x).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
engine.save_checkpoint("ckpt")
