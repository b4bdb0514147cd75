"""The figures, a file each: which runs, what is read from a run folder, how it is drawn, and what is seen in it."""
