"""Kernels compiled to machine code for chips that are not there."""
