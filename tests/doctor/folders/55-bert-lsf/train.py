import argparse

import torch

parser = argparse.ArgumentParser()
for name in ["--epochs", "--workers", "--seed", "--data", "--out"]:
    parser.add_argument(name)
