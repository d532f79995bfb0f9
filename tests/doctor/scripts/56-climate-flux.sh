#!/bin/bash
# by an author who did not know the doctor's rules
#flux: -N 2
#flux: --exclusive
#flux: -q pbatch
#flux: --bank=climate
#flux: -t 12:00:00
#flux: --job-name=climax
#flux: --output=climax-{{id}}.out

# MI300A nodes: 4 APUs and 96 cores in each. flux batch job.sh

module load rocm/6.4.1 cray-mpich
source /usr/workspace/climate/venv/bin/activate

export MIOPEN_USER_DB_PATH=/tmp/miopen-$USER
export HSA_XNACK=0
export OUT=/p/lustre5/$USER/climax

mkdir -p "$OUT"
flux resource list

# 8 ranks, 4 per node, 24 cores each
flux submit -N 2 -n 8 -c 24 -g 4 \
    python -m mpiddp --show 0 train.py --epochs 60 --workers 16 --out "$OUT"

cp "$OUT/last.pt" "$HOME/climax-final.pt"
