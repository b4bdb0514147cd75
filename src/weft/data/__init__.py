"""The public datasets: where they come from, how their files are read, and the cache that holds them packed.

sources.py says where each one lives and with which checksums, fetching.py downloads it, readers.py and pictures.py read
its original files, packing.py makes one .npz of them, and cache.py is all that a scenario needs. Nothing is pickled.
"""
