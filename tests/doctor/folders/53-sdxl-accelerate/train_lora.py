import argparse

import torch

parser = argparse.ArgumentParser()
for name in ["--resolution", "--batch-size", "--output"]:
    parser.add_argument(name)
