"""`autopar` and `python -m autopar` run the command line. What needs torch is imported only when a command runs."""

import sys

from autopar.version import __version__


def main() -> None:
    """The console script."""
    if sys.argv[1:] == ["--version"]:
        print(f"autopar {__version__}")
        return
    from autopar import cli  # this imports torch, which takes seconds

    cli.main()


if __name__ == "__main__":
    main()
