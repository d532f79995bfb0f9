import argparse

import torch

parser = argparse.ArgumentParser()
for name in ["--model", "--config"]:
    parser.add_argument(name)
