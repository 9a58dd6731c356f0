"""``python -m hasten``: the command line, so that torchrun can start it."""

from hasten.cli.app import main

if __name__ == "__main__":
    main()
