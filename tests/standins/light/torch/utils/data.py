"""Data that nobody reads, without workers."""


class TensorDataset:
    """As many samples as the tensor has numbers."""

    def __init__(self, tensor):
        self.tensor = tensor


class DataLoader:
    """Yields numbers."""

    def __init__(self, data, num_workers=0):
        assert num_workers == 0, "a test of workers needs torch itself"
        self.data = data

    def __iter__(self):
        return iter(range(len(self.data.tensor.values)))


def get_worker_info():
    """Return that this process is no worker."""
