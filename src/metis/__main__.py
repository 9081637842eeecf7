"""`python -m metis` is the command `metis`."""

from metis.cli.app import main

if __name__ == "__main__":
    main()
