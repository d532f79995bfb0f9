"""Couple a simulation and a training in one mpirun: each has its own communicator, one has a group.

    mpirun -n 4 python examples/coupled.py

The first half of the ranks integrates pendulums and sends their motion over MPI; the second half
trains a network, data-parallel, to predict a pendulum's next state.
"""

import math

import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp

ROUNDS, PENDULUMS, STEP_S = 60, 256, 0.1


def simulate(world, trainer):
    """Send rounds of pendulum states, before and after a step, to a training rank."""
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(ROUNDS):
        angle = (torch.rand(PENDULUMS, generator=generator) - 0.5) * math.pi
        speed = torch.randn(PENDULUMS, generator=generator)
        before = torch.stack([angle, speed], dim=1)
        for _ in range(10):
            speed = speed - torch.sin(angle) * STEP_S / 10
            angle = angle + speed * STEP_S / 10
        world.Send(torch.cat([before, torch.stack([angle, speed], dim=1)], dim=1).numpy(), dest=trainer)


def train(world, simulator, env):
    """Learn from the states that a simulating rank sends; return the first and the last loss."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).to(env.device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    states = torch.empty(PENDULUMS, 4)
    losses = []
    for _ in range(ROUNDS):
        world.Recv(states.numpy(), source=simulator)
        before, after = states.to(env.device).split(2, dim=1)
        loss = nn.functional.mse_loss(model(before), after)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def main():
    world = MPI.COMM_WORLD
    if world.size % 2:
        raise SystemExit("coupled.py needs an even number of ranks")
    half = world.size // 2
    trains = world.rank >= half
    comm = world.Split(trains)
    if not trains:
        simulate(world, trainer=world.rank + half)
        return
    with mpiddp.process_group(comm) as env:
        first, last = train(world, world.rank - half, env)
        print(f"trainer {env.rank}/{env.world_size}: loss {first:.4f} -> {last:.4f}\n", end="", flush=True)


if __name__ == "__main__":
    main()
