#!/bin/bash
# after the shape of: llnl/DD-NM-ROM#7, llnl/mpibind#45: flux batch of Tuolumne
#flux: --job-name=vae
#flux: --nodes=4
#flux: --exclusive
#flux: --time-limit=2h
#flux: --queue=pbatch
#flux: --bank=guests
#flux: --output=vae-{{id}}.out

module load rocm/6.4.1 cray-mpich/8.1.32
source /p/lustre5/$USER/venvs/torch/bin/activate

NODES=4
GPUS=4
export MIOPEN_USER_DB_PATH=/tmp/$USER-miopen
export NCCL_NET_GDR_LEVEL=3

flux run -N $NODES -n $((NODES * GPUS)) -c 24 -g 1 -o pmi=cray-pals \
    python -u -m mpiddp --prefix train.py --lr 3e-4
