#!/bin/bash -l
# by an author who did not know the doctor's rules
#SBATCH --job-name=llama-sft
#SBATCH --account=nlp-2026
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --mem=480G

set -eo pipefail
cd "$SLURM_SUBMIT_DIR"

## long run, send me a mail at the end
#SBATCH --time=36:00:00
#SBATCH --mail-type=END,FAIL
#SBATCH --output=llama-sft.%j.out

module load openmpi/5.0.3 cuda/12.4
conda activate llm

export HF_HOME=/project/nlp-2026/hf
export HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false

srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -m mpiddp train.py --model meta-llama/Llama-3.1-8B --config sft.json --log-dir logs --prefix
