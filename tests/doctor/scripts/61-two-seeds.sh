#!/bin/bash -l
# by an author who did not know the doctor's rules
#SBATCH --job-name=seeds
#SBATCH --nodes=1
#SBATCH --ntasks=8
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:8
#SBATCH --mem=960G
#SBATCH --time=08:00:00

# The model fits on 4 GPUs and the nodes have 8 and are given out as a whole:
# train two seeds side by side, each with half of the node.

module load openmpi/5.0.6 pytorch/2.6
source .venv/bin/activate

pids=()
for seed in 1 2; do
    srun --exact --nodes=1 --ntasks=4 --cpus-per-task=8 --gres=gpu:4 --mem=480G \
        --mpi=pmix --job-name="seed$seed" --output="seed$seed-%j.out" \
        python -m mpiddp train.py --seed "$seed" --epochs 120 --workers 7 --out "runs/seed$seed" &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit "$status"
