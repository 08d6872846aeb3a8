"""`python -m polyneuron` is the same as `polyneuron`."""

from polyneuron.cli.main import main

if __name__ == "__main__":
    main()
