"""The ``paceline`` command, also as ``python -m paceline``."""

import sys


def main() -> int:
    """Run the command. Ctrl-C while it is still being imported ends it as quietly as later on."""
    try:
        from paceline import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
