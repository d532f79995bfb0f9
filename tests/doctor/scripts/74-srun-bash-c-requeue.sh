#!/bin/bash
# by an author who did not know the doctor's rules
#SBATCH -J wave2vec
#SBATCH -p gpu-long
#SBATCH -N 3
#SBATCH --ntasks-per-node 4
#SBATCH --gres gpu:a100:4
#SBATCH -c 16
#SBATCH --mem 0
#SBATCH -t 1-0
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --signal B:USR1@300
#SBATCH -o %x-%j.out

source /etc/profile.d/modules.sh
module load cuda/12.4
export PATH=$HOME/micromamba/envs/w2v/bin:$PATH      # no activate needed

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# Five minutes before the end: queue the same job again. train.py loads last.pt.
trap 'echo "requeue at $(date)"; scontrol requeue "$SLURM_JOB_ID"' USR1

# Single quotes: each task expands its own SLURM_PROCID and SLURM_LOCALID.
srun -c "$SLURM_CPUS_PER_TASK" -K1 --label bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec python -u train.py --epochs 400 --batch-size 24
' &
# wait returns when the trap has run, so that bash does not defer it
wait $!
exit $?
