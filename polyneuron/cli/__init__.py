"""The command line: one module a command; `main` holds the table of them."""
