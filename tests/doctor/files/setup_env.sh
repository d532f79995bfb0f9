module load pytorch openmpi
