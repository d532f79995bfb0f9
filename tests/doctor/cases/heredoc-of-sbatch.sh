#!/bin/bash
for lr in 1e-3 1e-4; do
  sbatch <<END
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32
srun torchrun --standalone --nproc_per_node=4 train.py --lr $lr --job \$SLURM_JOB_ID
END
done
