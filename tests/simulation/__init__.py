"""A simulated job: the real logic of agents and coordinator, with a clock, a network and processes that are none."""
