"""Run Accelerate's own checks of its distributed data loop, except those of uneven inputs.

Those are for GPUs: on CPUs Accelerate warns that joining uneven inputs has no effect, and then waits for the other
rank, under torchrun, too.
"""

from accelerate.test_utils.scripts import test_distributed_data_loop as checks
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

accelerator = checks.create_accelerator()
checks.test_default_ensures_even_batch_sizes()
checks.test_can_disable_even_batches()
checks.test_pickle_accelerator()
data = checks.DummyDataset()
sizes = {"batch_size": checks.BATCH_SIZE, "num_workers": checks.NUM_WORKERS}
checks.test_data_loader(DataLoader(data, shuffle=False, **sizes), accelerator)
checks.test_data_loader(DataLoader(data, shuffle=True, **sizes), accelerator)
sampler = BatchSampler(RandomSampler(data), batch_size=checks.BATCH_SIZE, drop_last=False)
checks.test_data_loader(DataLoader(data, batch_sampler=sampler, num_workers=checks.NUM_WORKERS), accelerator)
accelerator.end_training()
print(f"rank {accelerator.process_index} is through\n", end="", flush=True)
