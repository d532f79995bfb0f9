#!/bin/bash
# by an author who did not know the doctor's rules
#SBATCH --job-name=ds-zero3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:h100:8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --output=%x_%j.out
#SBATCH --error=%x_%j.err

module load cuda/12.1 gcc/11.3
source /software/conda/etc/profile.d/conda.sh
conda activate deepspeed

export TORCH_EXTENSIONS_DIR=$HOME/.torch_ext
export TOKENIZERS_PARALLELISM=false

srun --cpus-per-task=$SLURM_CPUS_PER_TASK \
     deepspeed --num_gpus 8 pretrain.py \
     --deepspeed --deepspeed_config ds_config.json
