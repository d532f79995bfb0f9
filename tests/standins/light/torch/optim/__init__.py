"""The stand-in's optimizers: none."""
