"""What needs a GPU: run by tests/gpu/run on a machine that has one."""
