#!/bin/bash
# by an author who did not know the doctor's rules
#BSUB -J bert-pretrain
#BSUB -P NLP000
#BSUB -q gpu_long
#BSUB -n 8
#BSUB -R "span[ptile=4] affinity[core(8)]"
#BSUB -gpu "num=1/host:mode=shared:j_exclusive=yes"
#BSUB -o bert.%J.out
#BSUB -e bert.%J.err
#SBATCH --time=12:00:00

# BERT-base on 2 hosts with 4 V100 each, 8 ranks.
# Worked on the other cluster, ported to LSF.   bsub < job.sh

. /apps/lmod/lmod/init/bash
module load openmpi/5.0.5 cuda/12.2
source ~/envs/bert/bin/activate

cd "$LS_SUBCWD"
mkdir -p ckpt

export NCCL_SOCKET_IFNAME=ib0

mpirun -n $SLURM_NTASKS python -m mpiddp --show fold train.py --epochs 40 --workers 7 --out ckpt
rc=$?

echo "mpirun ended with $rc"
exit $rc
