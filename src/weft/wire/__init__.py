"""What travels, to the byte."""
