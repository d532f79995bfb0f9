import argparse

import torch

parser = argparse.ArgumentParser()
for name in ["--steps", "--out"]:
    parser.add_argument(name)
