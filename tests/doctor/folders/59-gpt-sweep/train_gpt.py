import argparse

import torch

parser = argparse.ArgumentParser()
for name in ["--lr", "--width", "--out"]:
    parser.add_argument(name)
