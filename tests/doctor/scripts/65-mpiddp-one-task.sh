#!/bin/bash -l
# by an author who did not know the doctor's rules
#SBATCH --job-name=resnet-ddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # one launcher per node
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --output=%x-%j.out
#SBATCH --mail-type=END,FAIL

# converted from our old torchrun script
module load gcc/12 openmpi/5.0.3 cuda/12.4 || exit 1
source ~/envs/mpiddp/bin/activate || exit 1

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
nvidia-smi -L

srun --mpi=pmix --cpus-per-task=$SLURM_CPUS_PER_TASK \
    python -m mpiddp train.py --epochs 50 --batch-size 256 --log-dir logs --show 0
