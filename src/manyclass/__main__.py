"""``python -m manyclass`` and the ``manyclass`` command."""

import sys


def main() -> None:
    """Run the command line; errors are one line, without a traceback, and exit with 2."""
    try:
        from .cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"manyclass: the command line needs {error.name}: pip install 'manyclass[cli]'")
    try:
        app()
    except (OSError, ValueError) as error:
        print(f"manyclass: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
