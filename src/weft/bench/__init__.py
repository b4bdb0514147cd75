"""weft bench: what this machine gives, measured in one run.

Each part of it is a module with `measure`, which gives plain numbers ready for JSON. What computes runs in a process of
its own, with the memory settings and the single thread of a worker, so that no part is touched by what another left
behind; what is asked of whole runs is asked of real `weft run` processes.
"""
