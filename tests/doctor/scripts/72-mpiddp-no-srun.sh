#!/bin/bash
# by an author who did not know the doctor's rules
#SBATCH --job-name=bert-cls
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --output=bert-%j.out

export PROJ=/project/textmining
export TOKENIZERS_PARALLELISM=false

# resources
#SBATCH --time=24:00:00
#SBATCH --mem=180G

module load openmpi/5.0.5 cuda/12.4 || exit 1
source $PROJ/venv/bin/activate || exit 1

nvidia-smi

python -m mpiddp --log-dir logs train.py --epochs 5 --batch-size 32
