import argparse

import torch

parser = argparse.ArgumentParser()
for name in ["--epochs", "--batch-size"]:
    parser.add_argument(name)
