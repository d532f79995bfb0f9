#!/bin/bash
# after the shape of: a user's Summit job: RunSim123
#BSUB -P ABC123
#BSUB -W 2:00
#BSUB -nnodes 4
#BSUB -J RunSim123
#BSUB -o RunSim123.%J
#BSUB -e RunSim123.%J

source /ccs/home/me/projects/activate_summit.sh
wdir=/ccs/home/me/projects/runs/run1
cd $wdir

jsrun -n 12 -r 3 -a 1 -g 1 python -m mpiddp /ccs/home/me/projects/train.py
