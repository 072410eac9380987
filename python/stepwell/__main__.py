"""``python -m stepwell``: the command line, where its script is not on the path."""

from ._cli import main

if __name__ == "__main__":
    main()
