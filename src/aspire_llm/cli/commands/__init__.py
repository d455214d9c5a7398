"""One module a command, one package a group of commands: see `cli/parser.py`."""
