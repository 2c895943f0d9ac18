"""One module for each command of `pagedjax`, with one function `run`. cli.py loads the one it needs by name."""
