"""Blocks of memory, the chunk or checkpoint each one holds, and the longest hit among them."""
