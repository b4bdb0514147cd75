"""Export the model of one task as a file that needs no weft: image bytes in, logits and predictions out."""
