"""A task's model out of a run folder, as a file that needs no weft: from bytes of an image to an answer by class."""
