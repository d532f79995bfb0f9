import argparse

import torch

parser = argparse.ArgumentParser()
for name in ["--data", "--epochs", "--workers", "--checkpoint"]:
    parser.add_argument(name)
