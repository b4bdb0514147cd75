"""Public datasets and image files.

sources.py lists the datasets with their addresses and checksums, download.py fetches them, formats.py reads their
original files, cache.py stores them as arrays. images.py reads image files of a user. Nothing is pickled.
"""
