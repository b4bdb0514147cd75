"""Hub and sites as folders and processes: keys, Flower's programs and their supervisor, runs and their status."""
