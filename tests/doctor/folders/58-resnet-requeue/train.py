import argparse

import torch

parser = argparse.ArgumentParser()
for name in ["--epochs", "--ckpt"]:
    parser.add_argument(name)
