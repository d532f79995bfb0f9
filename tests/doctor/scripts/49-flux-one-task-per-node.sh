#!/bin/bash
# after the shape of: converged-computing/jobspec-conversion: Slurm jobs as Flux batch files
#flux: --job-name=crusty-signal
#flux: -N 2
#flux: --exclusive
#flux: -q pdebug
#flux: -t 15m
#flux: --output=crusty-{{id}}.log

module load rocm/6.4.1
source /p/lustre5/me/venvs/torch/bin/activate

flux run -N 2 -n 2 -c 96 -g 4 -o pmi=pmix python -m mpiddp train.py --epochs=100
