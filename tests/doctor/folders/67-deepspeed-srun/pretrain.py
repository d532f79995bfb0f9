import argparse

import deepspeed

parser = argparse.ArgumentParser()
for name in ["--local_rank"]:
    parser.add_argument(name)
