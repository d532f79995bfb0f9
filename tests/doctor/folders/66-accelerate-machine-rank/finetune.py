import argparse

import torch

parser = argparse.ArgumentParser()
for name in ["--output-dir"]:
    parser.add_argument(name)
