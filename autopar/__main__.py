"""`autopar` and `python -m autopar` run the command line. What needs torch is imported only when a command runs."""

import sys

from autopar.version import __version__


def main() -> None:
    """The console script."""
    if sys.argv[1:] == ["--version"]:
        print(f"autopar {__version__}")
        return
    if sys.argv[1:2] == ["doctor"]:
        run_doctor()
        return
    from autopar import cli  # this imports torch, which takes seconds

    cli.main()


def run_doctor() -> None:
    """`autopar doctor`, without the rest of the command line: it must also run where torch is missing or too old."""
    import typer

    from autopar.doctor.command import doctor

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command("doctor")(doctor)
    try:
        app(sys.argv[2:], prog_name="autopar doctor", standalone_mode=True)
    except ValueError as error:
        from cost_models.errors import DeviceError  # this imports torch, which is there: devices were looked for

        if not isinstance(error, DeviceError):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
