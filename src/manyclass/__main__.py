"""``python -m manyclass`` and the ``manyclass`` command."""

import sys


def main() -> None:
    """Run the command line; errors are one line, without a traceback, and exit with 2."""
    try:
        from .cli import app
        from .train.processes import leave
    except ModuleNotFoundError as error:
        sys.exit(f"manyclass: the command line needs {error.name}: pip install 'manyclass[cli]'")
    code = 0
    try:
        app()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except (OSError, ValueError) as error:
        print(f"manyclass: {error}", file=sys.stderr)
        code = 2
    except RuntimeError as error:
        if type(error).__name__ != "LostContactError":
            raise
        print(f"manyclass: {error}", file=sys.stderr)
        code = 1  # not a user error, so torchrun may restart the process
    leave(code)


if __name__ == "__main__":
    main()
