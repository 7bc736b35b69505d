"""Slurm, through its own commands: what they are given, what they print, who runs them when."""
