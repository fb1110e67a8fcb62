#!/bin/bash
# Four hosts with eight ranks each: sbatch slurm.sh
# One launcher runs on each host and starts that host's ranks, so srun starts one task per host.
# Hosts, ranks of hosts, main host and port come from srun's variables.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
# SIGUSR1 reaches all ranks two minutes before the time is over; the script saves a checkpoint.

srun paceline launch --nproc_per_node 8 --max_restarts 2 --log_dir logs train.py --epochs 3
