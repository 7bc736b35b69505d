"""Who hands out nodes: Slurm, or the local scheduler that stands in for it on one machine."""
