"""A training script as torchrun starts it; the doctor's tests only look whether it is there."""
